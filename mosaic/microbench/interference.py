"""``interference``: what do two kernels on disjoint partitions cost each other, over quotas?

SMs are divided; caches and memory bandwidth are not. Paper section 3.3 and Fig. 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, product
from typing import ClassVar

from mosaic.backends.base import Backend
from mosaic.device import FORBID_EXTRA
from mosaic.microbench.beside import Beside, measure_beside
from mosaic.microbench.budget import Budget
from mosaic.microbench.kernels import Kernel, kernels_named
from mosaic.microbench.result import Recorder, Result, Spread
from mosaic.microbench.scaling import gb_per_s
from mosaic.microbench.settings import BenchSettings
from mosaic.microbench.sharing.variants import parts_of

KERNELS = ("gemm", "attention", "elementwise", "launches")
"""What is paired by default: two bound by arithmetic, one by bandwidth, one by launching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferencePoint:
    """One kernel beside another, each on its partition."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    kernel: str
    """The kernel that was timed."""
    beside: str
    """The kernel that ran next to it."""
    quota: int
    """Slots of the timed kernel."""
    beside_quota: int
    """Slots of the other."""
    alone_ms: Spread
    """Time of a call on the same partition with the other partition idle, taken right before."""
    together_ms: Spread | None
    """Time of the calls during which the other ran throughout; None where there was none."""
    overlap_ms: float
    """How long both ran."""
    slowdown: float | None
    """Median together over median alone; 1 is undisturbed."""
    alone_gb_per_s: float | None
    """Bandwidth alone in 1e9 bytes a second, by least traffic; None where it is not counted."""
    together_gb_per_s: float | None
    """Bandwidth side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceResult(Result):
    """Slow-downs by pair and quotas."""

    points: tuple[InterferencePoint, ...]
    """Two for each pair and split: each kernel beside the other."""


def measure_interference(
    backend: Backend,
    settings: BenchSettings,
    budget: Budget | None = None,
    *,
    kernels: Sequence[str] = KERNELS,
) -> InterferenceResult:
    """Times each pair of kernels, alone and side by side, at every split of the whole device in two.

    Args:
        backend: Where to measure.
        settings: Sizes and bounds.
        budget: Time; what does not fit is named in ``left_out``.
        kernels: Which kernels to pair, each with itself too.
    """
    recorder = Recorder(backend, budget or Budget())
    count = backend.device.num_slots
    splits = settings.splits(count)
    if not splits:
        recorder.cannot("kernels side by side", "the device has one slot, and two partitions need two")
    chosen = kernels_named(tuple(kernels), settings.scale, backend.torch_device)
    points: list[InterferencePoint] = []
    partitions = [part for split in splits for part in parts_of(split)]
    with backend.open_lanes(partitions or [tuple(range(count))]) as lanes:
        prepare = cache(lambda kernel, side: kernel.prepare(backend.torch_device))  # each side has inputs of its own
        for (first, second), split in _pieces(chosen, splits):
            if not recorder.budget.allows(f"{first.name} beside {second.name} at {split[0]}+{split[1]} slots"):
                continue
            one, other = (lanes.lane(part) for part in parts_of(split))
            both = ((one, prepare(first, 0)), (other, prepare(second, 1)))
            found = measure_beside(lanes, both, settings, backend.torch_device)
            points.append(_point((first, second), split, found[0]))
            points.append(_point((second, first), (split[1], split[0]), found[1]))
        lanes.drain()
    return InterferenceResult(
        points=tuple(points),
        absent=tuple(recorder.absent),
        left_out=recorder.left_out,
        origin=recorder.origin(),
    )


def _pieces(
    kernels: Sequence[Kernel], splits: Sequence[tuple[int, int]]
) -> list[tuple[tuple[Kernel, Kernel], tuple[int, int]]]:
    """Returns what to measure, even splits first, since they say the most when there is little time."""
    nearest = sorted(splits, key=lambda split: abs(split[0] - split[1]))
    return [
        (pair, split)
        for split, pair in product(nearest, combinations_with_replacement(kernels, 2))
        if pair[0] is not pair[1] or split[0] <= split[1]  # a kernel beside itself is the same both ways round
    ]


def _point(pair: tuple[Kernel, Kernel], split: tuple[int, int], found: Beside) -> InterferencePoint:
    alone = Spread.of(found.alone_ms)
    together = Spread.of(found.beside_ms) if found.beside_ms else None
    return InterferencePoint(
        kernel=pair[0].name,
        beside=pair[1].name,
        quota=split[0],
        beside_quota=split[1],
        alone_ms=alone,
        together_ms=together,
        overlap_ms=found.overlap_ms,
        slowdown=together.median / alone.median if together is not None and alone.median > 0 else None,
        alone_gb_per_s=gb_per_s(pair[0], alone.median),
        together_gb_per_s=gb_per_s(pair[0], together.median) if together is not None else None,
    )
