"""``interference``: the slowdown of two kernels on disjoint partitions, over quotas.

SMs are divided; caches and memory bandwidth are not. Paper section 3.3 and Fig. 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, product

from mosaic.backends.base import Backend
from mosaic.microbench.kernels import Kernel, kernels_named
from mosaic.microbench.report import Picture, Report
from mosaic.microbench.result import Recorder, Result, Spread
from mosaic.microbench.scaling import gb_per_s
from mosaic.microbench.settings import BenchSettings, Budget
from mosaic.microbench.timing import LaneTimes, measure_beside
from mosaic.microbench.variants import parts_of

KERNELS = ("gemm", "attention", "elementwise", "launches")
"""Default kernels: two bound by arithmetic, one by bandwidth, one by launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferencePoint:
    """One kernel beside another, each on its partition."""

    kernel: str
    """The timed kernel."""
    beside: str
    """The kernel beside it."""
    quota: int
    """Slots of the timed kernel."""
    beside_quota: int
    """Slots of the other."""
    alone_ms: Spread
    """Time of a call on the same partition with the other idle, measured right before."""
    together_ms: Spread | None
    """Time of the calls within the other's run; None without any."""
    overlap_ms: float
    """Time during which both ran."""
    slowdown: float | None
    """Median together over median alone; 1 is no slowdown."""
    alone_gb_per_s: float | None
    """Bandwidth alone in 1e9 bytes a second, by least traffic; None if not counted."""
    together_gb_per_s: float | None
    """Bandwidth side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceResult(Result):
    """Slowdowns by pair and quotas."""

    points: tuple[InterferencePoint, ...]
    """Two per pair and split: each kernel beside the other."""


def measure_interference(
    backend: Backend,
    settings: BenchSettings,
    budget: Budget | None = None,
    *,
    kernels: Sequence[str] = KERNELS,
) -> InterferenceResult:
    """Times each pair of kernels, alone and side by side, at every split of the whole device in two.

    Pairs each of ``kernels`` with each, itself included.
    """
    recorder = Recorder(backend, budget or Budget())
    count = backend.device.num_slots
    splits = settings.splits(count)
    if not splits:
        recorder.cannot("kernels side by side", "the device has one slot, and two partitions need two")
    selected = kernels_named(tuple(kernels), settings.scale, backend.torch_device)
    points: list[InterferencePoint] = []
    partitions = [part for split in splits for part in parts_of(split)]
    with backend.open_lanes(partitions or [tuple(range(count))]) as lanes:
        prepare = cache(lambda kernel, side: kernel.prepare(backend.torch_device))  # each side has inputs of its own
        for (first, second), split in _pieces(selected, splits):
            if not recorder.budget.allows(f"{first.name} beside {second.name} at {split[0]}+{split[1]} slots"):
                continue
            first_lane, second_lane = (lanes.lane(part) for part in parts_of(split))
            work = ((first_lane, prepare(first, 0)), (second_lane, prepare(second, 1)))
            times = measure_beside(lanes, work, settings, backend.torch_device)
            points.append(_point((first, second), split, times[0]))
            points.append(_point((second, first), (split[1], split[0]), times[1]))
        lanes.drain()
    return InterferenceResult(
        points=tuple(points),
        **recorder.common(),
    )


def _pieces(
    kernels: Sequence[Kernel], splits: Sequence[tuple[int, int]]
) -> list[tuple[tuple[Kernel, Kernel], tuple[int, int]]]:
    """Returns the pieces to measure, even splits first, which matter most in little time."""
    nearest = sorted(splits, key=lambda split: abs(split[0] - split[1]))
    return [
        (pair, split)
        for split, pair in product(nearest, combinations_with_replacement(kernels, 2))
        if pair[0] is not pair[1] or split[0] <= split[1]  # a kernel beside itself is symmetric
    ]


def _point(pair: tuple[Kernel, Kernel], split: tuple[int, int], times: LaneTimes) -> InterferencePoint:
    alone = Spread.of(times.alone_ms)
    together = Spread.of(times.beside_ms) if times.beside_ms else None
    return InterferencePoint(
        kernel=pair[0].name,
        beside=pair[1].name,
        quota=split[0],
        beside_quota=split[1],
        alone_ms=alone,
        together_ms=together,
        overlap_ms=times.overlap_ms,
        slowdown=together.median / alone.median if together is not None and alone.median > 0 else None,
        alone_gb_per_s=gb_per_s(pair[0], alone.median),
        together_gb_per_s=gb_per_s(pair[0], together.median) if together is not None else None,
    )


def report_interference(result: InterferenceResult) -> Report:
    """Returns a row per kernel, neighbour and split, and a matrix of slowdowns."""
    rows = [
        (
            point.kernel,
            point.beside,
            f"{point.quota}+{point.beside_quota}",
            point.alone_ms.median,
            point.together_ms.median if point.together_ms else None,
            point.slowdown,
            point.alone_gb_per_s,
            point.together_gb_per_s,
        )
        for point in result.points
    ]
    cells = {
        (f"{point.kernel}, {point.quota} of {point.quota + point.beside_quota}", point.beside): point.slowdown
        for point in sorted(result.points, key=lambda point: (point.kernel, point.quota))
    }
    return Report(
        title="Two kernels side by side, measured",
        headings=(("kernel", None), ("beside", None), ("slots", 0), ("alone\nms", 3), ("together\nms", 3),
                  ("slow-\ndown", 2), ("GB/s\nalone", 0), ("GB/s\ntogether", 0)),
        rows=rows,
        summary=_summary(result),
        picture=Picture(
            title="Slow-down beside a neighbour that has the other slots, measured",
            y_axis="each row: a kernel and its share of the slots; 1 is undisturbed, blank was not measured",
            cells=cells,
        ),
    )  # fmt: skip


def _summary(result: InterferenceResult) -> list[str]:
    lines = ["together counts only the calls during which the other kernel ran from beginning to end"]
    measured = [point for point in result.points if point.slowdown is not None]
    if measured:
        worst = max(measured, key=lambda point: point.slowdown or 0)
        lines.append(
            f"at most {worst.slowdown:.2f} times as long: {worst.kernel} on {worst.quota} slots beside "
            f"{worst.beside} on {worst.beside_quota}"
        )
    totals = [  # points of both kernels of a pair are adjacent
        (first.together_gb_per_s + second.together_gb_per_s, f"{first.kernel} on {first.quota}+{first.beside_quota}")
        for first, second in zip(result.points[::2], result.points[1::2], strict=True)
        if first.kernel == second.kernel and first.together_gb_per_s and second.together_gb_per_s
    ]
    if totals:
        lines.append("most moved by two kernels together: {:.0f} GB/s, {} slots".format(*max(totals)))
    if missed := sum(point.together_ms is None for point in result.points):
        lines.append(f"{missed} rows have no time together: no call lay inside the other's run")
    return lines
