"""``scaling``: the time of work at every quota. Paper section 3.3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mosaic.microbench.kernels import gb_per_s, kernel_of_module, kernel_set
from mosaic.microbench.pictures import lines_figure
from mosaic.microbench.result import Item, Question, Result, Row, Setup
from mosaic.microbench.settings import Spread, time_alone


def measure_scaling(setup: Setup) -> Iterator[Item]:
    """Times each kernel, or forward and forward with backward of each module, at every quota of the grid."""
    backend, settings = setup.backend, setup.settings
    kernels = [kernel_of_module(subject, backward=backward) for subject in setup.subjects for backward in (False, True)]
    kernels = kernels or [*kernel_set(settings.scale, backend.torch_device)]
    quotas = settings.quotas(backend.device.num_slots)
    with backend.open_lanes(tuple(range(quota)) for quota in quotas) as lanes:
        for work in kernels:
            if not setup.budget.allows(work.name):
                continue
            call = work.prepare(backend.torch_device)
            times: dict[int, tuple[int | None, Spread]] = {}
            for quota in reversed(quotas):  # the whole device first, so that the slowest points are left out
                if setup.budget.allows(f"{work.name} at {quota} slots"):
                    lane = lanes.lane(tuple(range(quota)))
                    times[quota] = lane.num_sms, Spread.of(time_alone(lane, call, settings).all_ms)
            lanes.drain()
            yield from _rows(work.name, work.flops, work.moved_bytes, times)


def _rows(work: str, flops: float, moved_bytes: float, times: dict[int, tuple[int | None, Spread]]) -> Iterator[Row]:
    """Yields the rows of one kernel by rising quota; speed is relative to the largest measured quota."""
    whole_ms = times[max(times)][1].median if times else 0.0
    for quota, (num_sms, time_ms) in sorted(times.items()):
        median_ms = time_ms.median
        yield Row(
            of="points",
            labels={"work": work, "quota": quota},
            values={
                "num_sms": num_sms,
                "time_ms": time_ms,
                "speed": whole_ms / median_ms if median_ms > 0 else 1.0,
                "tflops": flops / median_ms / 1e9 if flops and median_ms > 0 else None,
                "gb_per_s": gb_per_s(moved_bytes, median_ms),
            },
        )


def _picture(result: Result, subtitle: str) -> Any:
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in result.of("points"):
        time_ms, speed = row.values["time_ms"], row.number("speed") or 0.0
        assert isinstance(time_ms, Spread)
        lines.setdefault(str(row.labels["work"]), []).append(
            (
                int(row.labels["quota"]) / result.device.num_slots,
                speed,
                speed * time_ms.median / time_ms.third_quartile,
                speed * time_ms.median / time_ms.first_quartile,
            )
        )
    axes = ("share of the slots", "speed, relative to the largest quota")
    return lines_figure("Speed by quota, measured", subtitle, *axes, lines)


def _summary(result: Result) -> Sequence[str]:
    return ["speed is relative to the largest quota that was measured; GB/s count the least possible traffic"]


SCALING = Question(
    name="scaling",
    asks="how long does work take at every quota?",
    measure=measure_scaling,
    title="Time by quota, measured",
    of="points",
    columns={"work": ("work", None), "quota": ("slots", 0), "num_sms": ("SMs", 0), "time_ms": ("time, ms", 3),
             "speed": ("speed", 2), "tflops": ("TFLOP/s", 2), "gb_per_s": ("GB/s", 0)},
    merged=True,
    summary=_summary,
    picture=_picture,
    takes_subjects=True,
)  # fmt: skip
