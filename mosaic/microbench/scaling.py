"""``scaling``: the time of kernels at every quota. Paper section 3.3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mosaic.microbench.kernels import kernel_set
from mosaic.microbench.result import Question, Result, Row, Setup
from mosaic.microbench.settings import Spread, time_alone
from mosaic.report.figure import FAINT, colors_of, new_figure


def measure_scaling(setup: Setup) -> Iterator[Row]:
    """Times each kernel at every quota of the grid."""
    backend, settings = setup.backend, setup.settings
    quotas = settings.quotas(backend.device.num_slots)
    with backend.open_lanes(tuple(range(quota)) for quota in quotas) as lanes:
        for work in kernel_set(settings.scale, backend.torch_device):
            if not setup.budget.allows(work.name):
                continue
            call = work.prepare(backend.torch_device)
            times: dict[int, tuple[int | None, Spread]] = {}
            for quota in reversed(quotas):  # the whole device first, so that a time limit omits the slowest points
                if setup.budget.allows(f"{work.name} at {quota} slots"):
                    lane = lanes.lane(tuple(range(quota)))
                    times[quota] = lane.num_sms, Spread.of(time_alone(lane, call, settings).all_ms)
            lanes.drain()
            whole_ms = times[max(times)][1].median if times else 0.0
            for quota, (num_sms, time_ms) in sorted(times.items()):
                median_ms = time_ms.median
                values = {
                    "num_sms": num_sms,
                    "time_ms": time_ms,
                    "speed": whole_ms / median_ms if median_ms > 0 else 1.0,
                    "tflops": work.flops / median_ms / 1e9 if work.flops and median_ms > 0 else None,
                    "gb_per_s": work.gb_per_s(median_ms),
                }
                yield Row(of="points", labels={"work": work.name, "quota": quota}, values=values)


def _picture(result: Result, title: str, subtitle: str) -> Any:
    """Draws a line per kernel, and a dashed line at 1."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in result.of("points"):
        lines.setdefault(str(row.labels["work"]), []).append((int(row.labels["quota"]), row.number("speed") or 0.0))
    colors = colors_of(lines)
    axes = new_figure([3.8], title=title, subtitle=subtitle, width=9.0, legend=colors).axes[0]
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), color=colors[name], marker="o", markersize=3.5)
    axes.axhline(1.0, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="slots", ylabel="speed relative to the largest quota")
    return axes.figure


def _summary(result: Result) -> Sequence[str]:
    return ["speed is relative to the largest measured quota; GB/s count the minimum traffic"]


SCALING = Question(
    name="scaling",
    asks="how long do kernels take at each quota?",
    measure=measure_scaling,
    title="Time by quota, measured",
    of="points",
    columns={"work": ("work", None), "quota": ("slots", 0), "num_sms": ("SMs", 0), "time_ms": ("time, ms", 3),
             "speed": ("speed", 2), "tflops": ("TFLOP/s", 2), "gb_per_s": ("GB/s", 0)},
    summary=_summary,
    picture=_picture,
)  # fmt: skip
