"""Interference computed from how much memory bandwidth each module uses alone: the paper's Eq. 8.

B is a module's share of the bandwidth alone at its quota. Coefficients belong to a device, not to a model, and one to
each phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from mosaic.cost.interference.protocol import HasBandwidth, Neighbours
from mosaic.profile import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Eq8:
    """Coefficients of the paper's Eq. 8, in milliseconds."""

    e1: float
    """Constant; may be negative."""
    e2: float = 0.0
    """For each unit of the sum of B; not negative."""
    e3: float = 0.0
    """For each unit of the product of B; not negative."""

    def __post_init__(self) -> None:
        if not (self.e2 >= 0 and self.e3 >= 0 and math.isfinite(self.e1 + self.e2 + self.e3)):
            raise ValueError(f"e1={self.e1}, e2={self.e2}, e3={self.e3}; all finite, e2 and e3 not negative")

    def as_written_ms(self, shares: Sequence[float]) -> float:
        """Returns e1 + e2 * sum B + e3 * prod B over all modules of a device, exactly as the paper has it.

        It is not zero for a module alone (``shares`` of one), can be negative, and its product shrinks as modules are
        added; planning uses ``FullInterference``, which mends these three.
        """
        return self.e1 + self.e2 * math.fsum(shares) + self.e3 * math.prod(shares)


class FullInterference:
    """Paper Eq. 8, made fit for planning; without e3 its additive ablation (section 5.3.2).

    Zero for a module alone, never negative, and never less for more neighbours: the greatest value of the equation over
    the sets that hold the module and at least one of its neighbours, as in ``mosaic._search``. Where the sum
    dominates, that is the equation itself.

    Attributes:
        coefficients: By phase.
        share: What a module draws of the device's memory bandwidth alone, 0 to 1 (the paper's B).
    """

    is_pairwise = False

    def __init__(self, coefficients: Mapping[Phase, Eq8], bandwidths: HasBandwidth) -> None:
        """Takes coefficients of each phase (a phase without is undisturbed) and what modules use alone."""
        self.coefficients = dict(coefficients)
        self.share = shares_of(bandwidths)

    @property
    def is_zero(self) -> bool:
        """Whether no set of modules disturbs each other: checked at shares of 1, where Eq. 8 is greatest."""
        return all(c.as_written_ms((1.0,) * n) <= 0 for c in self.coefficients.values() for n in (2, 64))

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns what neighbours cost, in milliseconds; the same for a short module as for a long one."""
        coefficients = self.coefficients.get(phase)
        if not beside or coefficients is None:
            return 0.0
        # For each number of neighbours, those that draw most make sum and product largest.
        shares = [self.share(module, phase, quota)]
        worst = 0.0
        for drawn in sorted((self.share(name, phase, other) for name, other in beside), reverse=True):
            shares.append(drawn)
            worst = max(worst, coefficients.as_written_ms(shares))
        return worst


def shares_of(bandwidths: HasBandwidth) -> Callable[[str, Phase, int], float]:
    """Returns B by module, phase and quota on one device; remembered, since a search asks for the same few again."""

    @cache
    def share(module: str, phase: Phase, quota: int) -> float:
        return bandwidths.bandwidth(module, phase, 1, quota)

    return share
