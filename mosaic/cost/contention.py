"""Interference computed from how much memory bandwidth each module uses alone: the paper's Eq. 8, and a pairwise form.

Our own form, which is not pairwise, is in ``mosaic.cost.interference.leveling``.

B is a module's share of the bandwidth alone at its quota. Coefficients belong to a device, not to a model, and one to
each phase; ``fit_interference`` finds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mosaic.cost.interference.measured import Beside
from mosaic.profile import Phase


class HasBandwidth(Protocol):
    """Anything that knows B(m, a), such as ``Bandwidths``."""

    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the share of the device's memory bandwidth that a module alone uses, 0 to 1."""


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
    """Paper Eq. 8, made fit for planning.

    Zero for a module alone, never negative, and never less for more neighbours: the greatest value of the equation over
    the sets that hold the module and at least one of its neighbours, as in ``mosaic._search``. Where the sum
    dominates, that is the equation itself.
    """

    is_pairwise = False

    def __init__(self, coefficients: Mapping[Phase, Eq8], bandwidths: HasBandwidth) -> None:
        """Takes coefficients of each phase (a phase without is undisturbed) and what modules use alone."""
        self.coefficients = dict(coefficients)
        self._share = _Shares(bandwidths)

    def share(self, module: str, phase: Phase, quota: int) -> float:
        """Returns what a module draws of the device's memory bandwidth alone, 0 to 1 (the paper's B)."""
        return self._share(module, phase, quota)

    @property
    def is_zero(self) -> bool:
        """Whether no set of modules disturbs each other: checked at shares of 1, where Eq. 8 is greatest."""
        return all(c.as_written_ms((1.0,) * n) <= 0 for c in self.coefficients.values() for n in (2, 64))

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Beside) -> float:
        """Returns what neighbours cost, in milliseconds; the same for a short module as for a long one."""
        coefficients = self.coefficients.get(phase)
        if not beside or coefficients is None:
            return 0.0
        # For each number of neighbours, those that draw most make sum and product largest.
        shares = [self._share(module, phase, quota)]
        worst = 0.0
        for drawn in sorted((self._share(name, phase, other) for name, other in beside), reverse=True):
            shares.append(drawn)
            worst = max(worst, coefficients.as_written_ms(shares))
        return worst


class AdditiveInterference(FullInterference):
    """Paper Eq. 8 with its additive item only: the ablation of section 5.3.2."""

    def __init__(self, coefficients: Mapping[Phase, Eq8], bandwidths: HasBandwidth) -> None:
        """Takes coefficients with e3 = 0.

        Raises:
            ValueError: A coefficient e3 is not zero.
        """
        if any(c.e3 != 0 for c in coefficients.values()):
            raise ValueError("the additive form has e3=0; use FullInterference for a product")
        super().__init__(coefficients, bandwidths)


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


class SharedBandwidth:
    """The pairwise form: a share of the time alone, zero alone by construction (see ``Sharing``)."""

    is_pairwise = True

    def __init__(self, coefficients: Mapping[Phase, Sharing], bandwidths: HasBandwidth) -> None:
        """Takes coefficients of each phase (a phase without is undisturbed) and what modules use alone."""
        self.coefficients = dict(coefficients)
        self._share = _Shares(bandwidths)

    @property
    def is_zero(self) -> bool:
        """Whether no set of modules disturbs each other."""
        return all(c.extra_share(1.0, 63.0) == 0 for c in self.coefficients.values())

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Beside) -> float:
        """Returns the extra share of ``alone_ms``, in milliseconds."""
        coefficients = self.coefficients.get(phase)
        if not beside or coefficients is None:
            return 0.0
        others = math.fsum(self._share(name, phase, other) for name, other in beside)
        return alone_ms * coefficients.extra_share(self._share(module, phase, quota), others)


class _Shares:
    """B of modules on one device, remembered: a search asks for the same few again and again."""

    def __init__(self, bandwidths: HasBandwidth) -> None:
        self._bandwidths = bandwidths
        self._known: dict[tuple[str, Phase, int], float] = {}

    def __call__(self, module: str, phase: Phase, quota: int) -> float:
        key = (module, phase, quota)
        if key not in self._known:
            self._known[key] = self._bandwidths.bandwidth(module, phase, 1, quota)
        return self._known[key]
