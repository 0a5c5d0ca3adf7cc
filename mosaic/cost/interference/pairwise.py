"""Interference that adds up over neighbours, computed from the memory bandwidth that each module uses alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mosaic.cost.interference.eq8 import shares_of
from mosaic.cost.interference.protocol import HasBandwidth, Neighbours
from mosaic.profile import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Coefficients of the pairwise form; shares of the time alone; none is negative, so neighbours never help.

    With B the module's own share and P the sum of its neighbours', a module beside others takes longer by the share
    pressure * P + product * B * P: zero without neighbours (P = 0), by construction, and what each neighbour costs
    simply adds up, which every solver can state.
    """

    pressure: float = 0.0
    """What a neighbour costs anyone: caches, clocks, launches."""
    product: float = 0.0
    """What it costs those that need bandwidth themselves."""

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in (self.pressure, self.product)):
            raise ValueError(f"{self}: coefficients are finite and not negative")

    def extra_share(self, own: float, others: float) -> float:
        """Returns the extra share of the time alone.

        Args:
            own: B of the module, 0 to 1.
            others: Sum of B of its neighbours.
        """
        return (self.pressure + self.product * own) * others


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedSharing:
    """Takes the place of ``Sharing`` where nothing was measured: the share sqrt(B) * P; assumed, nothing to fit.

    B * P is lost if only traffic that meets a neighbour's waits for it, each drawing at random for as much of its time
    as its share of the bandwidth; P, if all of a module waits while a neighbour draws. This is the geometric mean of
    the two: of the forms without coefficients that were tried, it errs least on the simulated chip of ``bench.cost``,
    on other modules than those that judge it there; no GPU was asked.
    """

    def extra_share(self, own: float, others: float) -> float:
        """Returns the extra share of the time alone; see ``Sharing``."""
        return math.sqrt(own) * others


class SharedBandwidth:
    """The pairwise form: a share of the time alone, zero alone by construction (see ``Sharing``)."""

    is_pairwise = True

    def __init__(self, coefficients: Mapping[Phase, Sharing | AssumedSharing], bandwidths: HasBandwidth) -> None:
        """Takes coefficients of each phase (a phase without is undisturbed) and what modules use alone."""
        self.coefficients = dict(coefficients)
        self._share = shares_of(bandwidths)

    @property
    def is_zero(self) -> bool:
        """Whether no set of modules disturbs each other."""
        return all(c.extra_share(1.0, 63.0) == 0 for c in self.coefficients.values())

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns the extra share of ``alone_ms``, in milliseconds."""
        coefficients = self.coefficients.get(phase)
        if not beside or coefficients is None:
            return 0.0
        others = math.fsum(self._share(name, phase, other) for name, other in beside)
        return alone_ms * coefficients.extra_share(self._share(module, phase, quota), others)

    def pair_shares(
        self, module: str, beside: str, phase: Phase, *, quotas: Sequence[int], beside_quotas: Sequence[int]
    ) -> Sequence[Sequence[float]]:
        """Returns what one neighbour costs, as shares of the time alone; see ``PairShares``."""
        coefficients = self.coefficients.get(phase)
        if coefficients is None:
            return ()
        drawn = [self._share(beside, phase, other) for other in beside_quotas]
        own = [self._share(module, phase, quota) for quota in quotas]
        return [[coefficients.extra_share(share, other) for other in drawn] for share in own]
