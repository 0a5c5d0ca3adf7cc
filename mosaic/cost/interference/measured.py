"""What a module loses because of the modules beside it on the same device.

Partitions of a layout never share an SM (or a core), but memory bandwidth, caches and power are shared, so a
module beside others takes longer than alone. Every form answers one question, ``extra_ms``; a module alone
loses nothing, by construction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from mosaic.profile import GroupSample, PairSample, Phase, Profile

Beside = Sequence[tuple[str, int]]
"""Neighbours on one device: each module's name and its quota in slots."""


class Interference(Protocol):
    """A form of interference; never negative, and zero without neighbours.

    The solver relies on both: the time alone is then a lower bound on the time beside anyone.
    """

    @property
    def is_zero(self) -> bool:
        """Whether it is zero for every module and every neighbour."""

    @property
    def is_pairwise(self) -> bool:
        """Whether the extras of single neighbours simply add up; solvers then can state it linearly."""

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Beside) -> float:
        """Returns the time that ``beside`` costs ``module`` in one phase on one device, in milliseconds.

        Args:
            module: The module that is slowed down.
            phase: Forward or backward, of all of them.
            quota: Slots of ``module``.
            alone_ms: Its time alone at this quota (and its degree), in milliseconds.
            beside: The others on the device; empty when it is alone.
        """


@runtime_checkable
class PairShares(Protocol):
    """A pairwise form whose extras are shares of the time alone; the exact search then asks it far less often."""

    def pair_shares(
        self, module: str, beside: str, phase: Phase, *, quotas: Sequence[int], beside_quotas: Sequence[int]
    ) -> Sequence[Sequence[float]]:
        """Returns the extra shares of ``module`` beside one neighbour; empty where they all are 0.

        Args:
            module: The module that is slowed down.
            beside: The neighbour.
            phase: Forward or backward, of both.
            quotas: Slots that ``module`` may have: the rows.
            beside_quotas: Slots that the neighbour may have: the entries of a row.
        """


class NoInterference:
    """Modules do not disturb each other: the paper's interference-unaware ablation (section 5.3.2)."""

    is_zero = True
    is_pairwise = True

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Beside) -> float:
        """Returns 0."""
        return 0.0


class AssumedPair(NamedTuple):
    """A pair that was not measured and what is used in its place."""

    module: str
    """The module that is slowed down."""
    beside: str
    """Its neighbour."""
    phase: Phase
    """Forward or backward."""
    share: float
    """Extra share of the time alone that is assumed: the median of what was measured in this phase, or 0."""


class MeasuredInterference:
    """Extra shares of time from pairs that were run side by side.

    Beside one neighbour a module takes the share more that was measured for this pair and phase at the nearest
    quotas (nearest in the product of both ratios). Beside several the shares add up. A pair that was not
    measured gets the median of its phase; ``assumed`` lists those. A pair that measured faster than alone counts as
    zero: that is noise, and the solver relies on it not being a gain.
    """

    is_pairwise = True

    def __init__(self, pairs: Iterable[PairSample], *, candidates: Iterable[tuple[str, str]] = ()) -> None:
        """Collects what was measured.

        Args:
            pairs: Measured pairs, of any quotas.
            candidates: The ordered pairs (module, beside) that might share a device; those of them
                that were not measured show up in ``assumed``.
        """
        raw: dict[tuple[str, str, Phase], dict[tuple[int, int], list[float]]] = {}
        for pair in pairs:
            points = raw.setdefault((pair.module, pair.beside, pair.phase), {})
            points.setdefault((pair.quota, pair.beside_quota), []).append(max(0.0, pair.slowdown - 1))
        self._measured: Mapping[tuple[str, str, Phase], tuple[tuple[int, int, float], ...]] = {
            key: tuple((*quotas, statistics.median(shares)) for quotas, shares in sorted(points.items()))
            for key, points in raw.items()
        }
        self._default = {phase: self._median_share(phase) for phase in Phase}
        self._candidates = tuple(candidates)

    @classmethod
    def from_profile(cls, profile: Profile) -> MeasuredInterference:
        """Uses the pairs of a profile, and its groups of two in one phase; larger groups say nothing about one pair.

        Pairs that might share a stage are those that do not depend on each other.
        """
        graph = profile.graph
        candidates = [(m, n) for m in graph.names for n in graph.names if graph.independent(m, n)]
        return cls((*profile.pairs, *_pairs_of(profile.groups)), candidates=candidates)

    @property
    def is_zero(self) -> bool:
        """Whether no measured pair slowed anything down."""
        return all(share == 0 for points in self._measured.values() for _, _, share in points)

    @property
    def assumed(self) -> tuple[AssumedPair, ...]:
        """Pairs that might share a device but were not measured, with the share that stands in."""
        return tuple(
            AssumedPair(module, beside, phase, self._default[phase])
            for module, beside in self._candidates
            for phase in Phase
            if (module, beside, phase) not in self._measured
        )

    def extra_share(self, module: str, phase: Phase, *, quota: int, beside: Beside) -> float:
        """Returns the extra share of ``module``'s time alone; 0.25 means that it takes a quarter longer."""
        return math.fsum(self._pair_share(module, phase, quota, name, other) for name, other in beside)

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Beside) -> float:
        """Returns the extra share of ``alone_ms``, in milliseconds; see ``Interference``."""
        return alone_ms * self.extra_share(module, phase, quota=quota, beside=beside)

    def pair_shares(
        self, module: str, beside: str, phase: Phase, *, quotas: Sequence[int], beside_quotas: Sequence[int]
    ) -> Sequence[Sequence[float]]:
        """Returns what one neighbour costs, as shares of the time alone; see ``PairShares``."""
        return [[self._pair_share(module, phase, own, beside, other) for other in beside_quotas] for own in quotas]

    def _pair_share(self, module: str, phase: Phase, quota: int, beside: str, beside_quota: int) -> float:
        points = self._measured.get((module, beside, phase))
        if points is None:
            return self._default[phase]

        def distance(point: tuple[int, int, float]) -> float:
            return abs(math.log(quota / point[0])) + abs(math.log(beside_quota / point[1]))

        return min(points, key=distance)[2]

    def _median_share(self, phase: Phase) -> float:
        shares = [share for key, points in self._measured.items() if key[2] is phase for _, _, share in points]
        return statistics.median(shares) if shares else 0.0


def _pairs_of(groups: Iterable[GroupSample]) -> Iterator[PairSample]:
    for group in groups:
        if len(group.members) != 2 or group.members[0].phase is not group.members[1].phase:
            continue
        for mine, other in (group.members, group.members[::-1]):
            yield PairSample(
                module=mine.module,
                beside=other.module,
                phase=mine.phase,
                quota=mine.quota,
                beside_quota=other.quota,
                times_ms=mine.times_ms,
                alone_ms=mine.alone_ms,
            )
