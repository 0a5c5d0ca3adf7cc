"""Interference from pairs of modules that were run side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from mosaic.cost.interference.protocol import Neighbours
from mosaic.profile import PairSample, Phase


class MeasuredInterference:
    """Extra shares of time from pairs that were run side by side.

    Beside one neighbour a module takes the share more that was measured for this pair and phase at the nearest
    quotas (nearest in the product of both ratios). Beside several the shares add up. A pair that was not
    measured gets the median of its phase. A pair that measured faster than alone counts as zero: that is noise, and
    the solver relies on it not being a gain.
    """

    is_pairwise = True

    def __init__(self, pairs: Iterable[PairSample]) -> None:
        """Collects measured pairs, of any quotas."""
        raw: dict[tuple[str, str, Phase], dict[tuple[int, int], list[float]]] = {}
        for pair in pairs:
            points = raw.setdefault((pair.module, pair.beside, pair.phase), {})
            points.setdefault((pair.quota, pair.beside_quota), []).append(max(0.0, pair.slowdown - 1))
        self._measured: Mapping[tuple[str, str, Phase], tuple[tuple[int, int, float], ...]] = {
            key: tuple((*quotas, statistics.median(shares)) for quotas, shares in sorted(points.items()))
            for key, points in raw.items()
        }
        self._default = {phase: self._median_share(phase) for phase in Phase}

    @property
    def is_zero(self) -> bool:
        """Whether no measured pair slowed anything down."""
        return all(share == 0 for points in self._measured.values() for _, _, share in points)

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns the extra share of ``alone_ms``, in milliseconds; see ``Interference``."""
        return alone_ms * math.fsum(self._pair_share(module, phase, quota, name, other) for name, other in beside)

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
