"""Interference between modules on one device.

Partitions of a layout never share an SM (or a core), but they share memory bandwidth, caches and power. Beside
neighbours a module takes longer than alone, by a share of its time alone that adds up over neighbours. The share is
measured in pairs, or assumed from the bandwidth B that each module uses alone at its quota, 0 to 1 of the device's. The
paper's Eq. 8 (section 3.3) predicts milliseconds instead of shares; its errors are no smaller (bench/README.md,
predictions).
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from typing import Any

from mosaic.profile import PairSample, Phase

Neighbours = Sequence[tuple[str, int]]
"""Other modules on one device, with their quotas in slots."""


class Interference(ABC):
    """A form of interference.

    Shares must not be negative: the solver uses the time alone as a lower bound.

    Attributes:
        is_zero: True if it is zero for every module and neighbour.
    """

    is_zero: bool

    @abstractmethod
    def share(self, module: str, phase: Phase, quota: int, beside: str, beside_quota: int) -> float:
        """Returns the slowdown of ``module`` by one neighbour, as a share of its time alone."""

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns the time that neighbours add to a phase that takes ``alone_ms``, in milliseconds."""
        return alone_ms * math.fsum(self.share(module, phase, quota, name, other) for name, other in beside)

    @cached_property
    def _tables(self) -> dict[tuple[Any, ...], list[list[float]]]:
        return {}

    def table(
        self, module: str, beside: str, phase: Phase, quotas: Sequence[int], beside_quotas: Sequence[int]
    ) -> list[list[float]]:
        """Returns the shares at all quotas, a row per quota of the module; empty if all are 0."""
        key = (module, beside, phase, tuple(quotas), tuple(beside_quotas))
        if key not in self._tables:  # called dozens of times in planning over a shared network
            rows = [[self.share(module, phase, own, beside, other) for other in beside_quotas] for own in quotas]
            self._tables[key] = rows if any(map(any, rows)) else []
        return self._tables[key]


class NoInterference(Interference):
    """No module disturbs another: the paper's interference-unaware ablation (section 5.3.2)."""

    is_zero = True

    def share(self, module: str, phase: Phase, quota: int, beside: str, beside_quota: int) -> float:
        return 0.0


class MeasuredInterference(Interference):
    """Measured slowdowns of pairs that ran side by side.

    The slowdown by a neighbour is that of the pair and phase at the nearest measured quotas (by the product of both
    ratios). A pair without measurements gets the median of its phase. A negative slowdown is noise and counts as zero,
    because the solver needs shares of 0 or more.
    """

    def __init__(self, pairs: Iterable[PairSample]) -> None:
        shares: dict[tuple[str, str, Phase], dict[tuple[int, int], list[float]]] = {}
        for pair in pairs:
            points = shares.setdefault((pair.module, pair.beside, pair.phase), {})
            points.setdefault((pair.quota, pair.beside_quota), []).append(max(0.0, pair.slowdown - 1))
        self._measured = {
            key: tuple((*quotas, statistics.median(group)) for quotas, group in sorted(points.items()))
            for key, points in shares.items()
        }
        by_phase = {
            phase: [share for key, points in self._measured.items() if key[2] is phase for _, _, share in points]
            for phase in Phase
        }
        self._default = {phase: statistics.median(own or [0.0]) for phase, own in by_phase.items()}
        self.is_zero = not any(map(any, by_phase.values()))

    def share(self, module: str, phase: Phase, quota: int, beside: str, beside_quota: int) -> float:
        points = self._measured.get((module, beside, phase))
        if points is None:
            return self._default[phase]

        def distance(point: tuple[int, int, float]) -> float:
            return abs(math.log(quota / point[0])) + abs(math.log(beside_quota / point[1]))

        return min(points, key=distance)[2]


class BandwidthInterference(Interference):
    """Assumed slowdowns without measurements: sqrt(B) of the module times B of each neighbour.

    The slowdown is the product of both B if only concurrent traffic waits, and the neighbour's B if the module waits
    whenever the neighbour uses memory. This is the geometric mean of both. Of the forms without coefficients it had the
    smallest errors on simulated groups (bench/README.md, lab notes). It was not compared with a GPU.
    """

    is_zero = False

    def __init__(self, bandwidth: Callable[[str, Phase, int], float]) -> None:
        """Takes B by module, phase and quota."""
        self._bandwidth = cache(bandwidth)  # a search repeats the same few calls

    def share(self, module: str, phase: Phase, quota: int, beside: str, beside_quota: int) -> float:
        return math.sqrt(self._bandwidth(module, phase, quota)) * self._bandwidth(beside, phase, beside_quota)
