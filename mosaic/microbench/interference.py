"""``interference``: the slowdown of two kernels on disjoint partitions, over quotas.

SMs are divided, caches and memory bandwidth are not. Paper section 3.3 and Fig. 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations_with_replacement, product
from typing import Any

from mosaic.microbench.kernels import Kernel, kernel_set
from mosaic.microbench.result import Question, Result, Row, Setup, absent, bars_figure
from mosaic.microbench.settings import LaneTimes, Spread, measure_beside
from mosaic.microbench.variants import parts_of

KERNELS = ("gemm", "attention", "elementwise", "launches")
"""Two kernels bound by arithmetic, one by bandwidth, one by launches."""


def measure_interference(setup: Setup) -> Iterator[Row]:
    """Times each pair of kernels alone and side by side, at every split of the device in two.

    Even splits come first, for short time limits.
    """
    backend, settings = setup.backend, setup.settings
    splits = settings.splits(backend.device.num_slots)
    if not splits:
        yield absent("kernels side by side", "the device has one slot, but two partitions need two")
        return
    kernels = kernel_set(settings.scale, backend.torch_device, KERNELS)
    nearest = sorted(splits, key=lambda split: abs(split[0] - split[1]))
    with backend.open_lanes([part for split in splits for part in parts_of(split)]) as lanes:
        prepare = cache(lambda kernel, side: kernel.prepare(backend.torch_device))  # separate inputs
        for split, (first, second) in product(nearest, combinations_with_replacement(kernels, 2)):
            if first is second and split[0] > split[1]:  # symmetric
                continue
            if not setup.budget.allows(f"{first.name} beside {second.name} at {split[0]}+{split[1]} slots"):
                continue
            first_lane, second_lane = (lanes.lane(part) for part in parts_of(split))
            works = ((first_lane, prepare(first, 0)), (second_lane, prepare(second, 1)))
            times = measure_beside(lanes, works, settings, backend.torch_device)
            yield _row(first, second, split, times[0])
            yield _row(second, first, (split[1], split[0]), times[1])
        lanes.drain()


def _row(kernel: Kernel, beside: Kernel, split: tuple[int, int], times: LaneTimes) -> Row:
    alone, together = Spread.of(times.alone_ms), Spread.of(times.beside_ms) if times.beside_ms else None
    return Row(
        of="points",
        labels={"kernel": kernel.name, "beside": beside.name, "quotas": f"{split[0]}+{split[1]}"},
        values={
            "alone_ms": alone,
            "together_ms": together,
            "overlap_ms": times.overlap_ms,
            "slowdown": together.median / alone.median if together is not None and alone.median > 0 else None,
            "alone_gb_per_s": kernel.gb_per_s(alone.median),
            "together_gb_per_s": kernel.gb_per_s(together.median) if together is not None else None,
        },
    )


def _summary(result: Result) -> Sequence[str]:
    points = result.of("points")
    lines = ["together: only calls during which the other kernel ran all the time"]
    if measured := [row for row in points if row.number("slowdown") is not None]:
        worst = max(measured, key=lambda row: row.number("slowdown") or 0)
        kernel, beside, quotas = worst.labels.values()
        lines.append(f"at most {worst.number('slowdown'):.2f} times as long: {kernel} beside {beside}, {quotas} slots")
    if missed := len(points) - len(measured):
        lines.append(f"{missed} rows have no time together: the kernels did not overlap")
    return lines


def _picture(result: Result, title: str, subtitle: str) -> Any:
    """Draws the slowdown at the even split."""
    bars = []
    for row in result.of("points"):
        first, second = (int(quota) for quota in str(row.labels["quotas"]).split("+"))
        if abs(first - second) <= 1:
            name = f"{row.labels['kernel']} beside {row.labels['beside']}, {row.labels['quotas']} slots"
            text = f"{row.text('slowdown')}×"
            bars.append((name, str(row.labels["kernel"]), row.number("slowdown") or 0.0, text))
    return bars_figure(title, subtitle, "slowdown at the even split; 1: no interference", bars)


INTERFERENCE = Question(
    name="interference",
    asks="how much do two kernels side by side slow each other down?",
    measure=measure_interference,
    title="Two kernels side by side, measured",
    of="points",
    columns={"kernel": ("kernel", None), "beside": ("beside", None), "quotas": ("slots", 0),
             "alone_ms": ("alone, ms", 3), "together_ms": ("together, ms", 3), "slowdown": ("slow-\ndown", 2),
             "alone_gb_per_s": ("GB/s\nalone", 0), "together_gb_per_s": ("GB/s\ntogether", 0)},
    summary=_summary,
    picture=_picture,
)  # fmt: skip
