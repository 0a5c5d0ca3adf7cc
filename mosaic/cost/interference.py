"""The time that modules on one device cost each other.

Partitions of a layout never share an SM (or a core). Memory bandwidth, caches and power are shared, so a module beside
neighbours takes longer than alone. Four forms predict by how much:

* ``none``: not at all, the paper's interference-unaware ablation (section 5.3.2),
* ``measured``: the extra shares of measured pairs, added up over neighbours,
* ``pairwise``: a share of the time alone that is linear in the bandwidth of each neighbour,
* ``eq8``: the paper's Eq. 8 (section 3.3), in milliseconds.

B is the share of the device's memory bandwidth that a module draws alone at its quota, 0 to 1. Coefficients belong to a
device, not to a model, and each phase has its own.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from mosaic.errors import InvalidProfileError, unknown
from mosaic.profile import PairSample, Phase, Sample

Neighbours = Sequence[tuple[str, int]]
"""Other modules on one device, each with its quota in slots."""


class HasBandwidth(Protocol):
    """A source of B(m, a) of paper section 3.3, such as ``Bandwidths`` or an analytic cost model."""

    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the share of the device's memory bandwidth that a module alone draws, 0 to 1."""


class Interference(ABC):
    """A form of interference; never negative, and zero without neighbours.

    The solver relies on both: the time alone is then a lower bound on the time beside neighbours.

    Attributes:
        is_zero: True if the form is zero for every module and every neighbour.
    """

    is_zero: bool

    @abstractmethod
    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns the time that neighbours add to one phase of a module on one device, in milliseconds.

        Args:
            module: Module that is slowed down.
            phase: Phase of all modules on the device.
            quota: Slots of ``module``.
            alone_ms: Time of ``module`` alone at this quota and its degree, in milliseconds.
            beside: Other modules on the device.
        """


class PairShares(Interference):
    """A form whose extras are shares of the time alone and add up over neighbours: solvers state it linearly."""

    @abstractmethod
    def share(self, module: str, phase: Phase, quota: int, beside: str, beside_quota: int) -> float:
        """Returns what one neighbour adds to the time of ``module`` alone, as a share of it."""

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        return alone_ms * math.fsum(self.share(module, phase, quota, name, other) for name, other in beside)

    @cached_property
    def _tables(self) -> dict[tuple[Any, ...], list[list[float]]]:
        return {}

    def table(
        self, module: str, beside: str, phase: Phase, quotas: Sequence[int], beside_quotas: Sequence[int]
    ) -> list[list[float]]:
        """Returns the shares at all quotas: a row for each of the module's; empty if all are 0."""
        key = (module, beside, phase, tuple(quotas), tuple(beside_quotas))
        if key not in self._tables:  # planning over a shared network asks dozens of times
            rows = [[self.share(module, phase, own, beside, other) for other in beside_quotas] for own in quotas]
            self._tables[key] = rows if any(map(any, rows)) else []
        return self._tables[key]


class NoInterference(PairShares):
    """No module disturbs another: the paper's interference-unaware ablation (section 5.3.2)."""

    is_zero = True

    def share(self, module: str, phase: Phase, quota: int, beside: str, beside_quota: int) -> float:
        return 0.0


class MeasuredInterference(PairShares):
    """Extra shares of time of pairs that ran side by side.

    Beside one neighbour a module takes the share more that was measured for this pair and phase at the nearest quotas
    (nearest in the product of both ratios). A pair without measurements gets the median of its phase. A pair that ran
    faster than alone counts as zero: that is noise, and the solver relies on neighbours never helping.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Coefficients of the pairwise form; none is negative, so neighbours never help.

    With B of the module and P, the sum of its neighbours' B, the module takes longer by the share
    pressure * P + product * B * P of its time alone.
    """

    pressure: float = 0.0
    """Cost to any module: caches, clocks."""
    product: float = 0.0
    """Cost to modules that need bandwidth themselves."""

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in (self.pressure, self.product)):
            raise ValueError(f"{self}: coefficients are finite and not negative")

    def extra_share(self, own: float, others: float) -> float:
        """Returns the extra share of the time alone, from B of the module and the sum of B of its neighbours."""
        return (self.pressure + self.product * own) * others


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedSharing:
    """The pairwise form where nothing was measured: the share sqrt(B) * P of the time alone.

    B * P is lost if only traffic that meets a neighbour's traffic waits; P is lost if all of the module waits while a
    neighbour draws. This is the geometric mean of both. Of the forms without coefficients it erred least on simulated
    groups (bench/README.md, lab notes). It was not compared with a GPU.
    """

    def extra_share(self, own: float, others: float) -> float:
        """Returns the extra share of the time alone; see ``Sharing``."""
        return math.sqrt(own) * others


class PairwiseInterference(PairShares):
    """The pairwise form: a share of the time alone, by ``Sharing``."""

    def __init__(self, coefficients: Mapping[Phase, Sharing | AssumedSharing], bandwidths: HasBandwidth) -> None:
        """Takes coefficients by phase; a phase without coefficients is undisturbed."""
        self._coefficients = dict(coefficients)
        self._drawn = _shares_of(bandwidths)
        self.is_zero = all(own.extra_share(1.0, 63.0) == 0 for own in coefficients.values())

    def share(self, module: str, phase: Phase, quota: int, beside: str, beside_quota: int) -> float:
        own = self._coefficients.get(phase)
        if own is None:
            return 0.0
        return own.extra_share(self._drawn(module, phase, quota), self._drawn(beside, phase, beside_quota))


@dataclass(frozen=True, slots=True, kw_only=True)
class Eq8:
    """Coefficients of the paper's Eq. 8, in milliseconds."""

    e1: float
    """Constant; may be negative."""
    e2: float = 0.0
    """For each unit of the sum of B; not negative."""
    e3: float = 0.0
    """For each unit of the product of B; not negative. 0 is the paper's additive ablation (section 5.3.2)."""

    def __post_init__(self) -> None:
        if not (self.e2 >= 0 and self.e3 >= 0 and math.isfinite(self.e1 + self.e2 + self.e3)):
            raise ValueError(f"e1={self.e1}, e2={self.e2}, e3={self.e3}; all finite, e2 and e3 not negative")

    def as_written_ms(self, shares: Sequence[float]) -> float:
        """Returns e1 + e2 * sum B + e3 * prod B over all modules of a device, exactly as the paper has it.

        The equation is not zero for a module alone (``shares`` of one), can be negative, and its product shrinks as
        modules are added. Planning uses ``Eq8Interference``, which mends these three.
        """
        return self.e1 + self.e2 * math.fsum(shares) + self.e3 * math.prod(shares)


class Eq8Interference(Interference):
    """Paper Eq. 8 for planning: zero for a module alone, never negative, and never less for more neighbours.

    It is the greatest value of the equation over the sets that hold the module and at least one of its neighbours, as
    in ``mosaic._search``. Where the sum dominates, that is the equation itself.

    Attributes:
        coefficients: By phase.
        share: B of a module in a phase at a quota.
    """

    def __init__(self, coefficients: Mapping[Phase, Eq8], bandwidths: HasBandwidth) -> None:
        """Takes coefficients by phase; a phase without coefficients is undisturbed."""
        self.coefficients = dict(coefficients)
        self.share = _shares_of(bandwidths)
        # Eq. 8 is greatest at shares of 1.
        self.is_zero = all(c.as_written_ms((1.0,) * n) <= 0 for c in self.coefficients.values() for n in (2, 64))

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns the cost of neighbours in milliseconds, the same for a short module as for a long one."""
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


Coefficients = Eq8 | Sharing | AssumedSharing

FORMS: Mapping[str, Callable[[Sequence[PairSample], Any, HasBandwidth], Interference]] = MappingProxyType(
    {
        "none": lambda pairs, coefficients, bandwidths: NoInterference(),
        "measured": lambda pairs, coefficients, bandwidths: MeasuredInterference(pairs),
        "pairwise": lambda pairs, coefficients, bandwidths: PairwiseInterference(coefficients, bandwidths),
        "eq8": lambda pairs, coefficients, bandwidths: Eq8Interference(coefficients, bandwidths),
    }
)
"""Forms by name: from measured pairs, coefficients by phase, and the bandwidth that modules draw alone."""

_TAKES: Mapping[str, tuple[type, ...]] = MappingProxyType({"pairwise": (Sharing, AssumedSharing), "eq8": (Eq8,)})


def make_interference(
    name: str, pairs: Sequence[PairSample], coefficients: Mapping[Phase, Coefficients], bandwidths: HasBandwidth
) -> Interference:
    """Returns a form of interference.

    Args:
        name: Name in ``FORMS``.
        pairs: Measured pairs of modules.
        coefficients: By phase, for ``pairwise`` and ``eq8``; a phase without coefficients is undisturbed.
        bandwidths: Bandwidth that modules draw alone.

    Raises:
        ValueError: The name is not in the table, or the coefficients are not those of the form.
    """
    if name not in FORMS:
        raise ValueError(unknown("form of interference", name, FORMS))
    takes = _TAKES.get(name, ())
    if bool(coefficients) != bool(takes) or not all(isinstance(value, takes) for value in coefficients.values()):
        types = ", ".join(sorted({type(value).__name__ for value in coefficients.values()})) or "none"
        needed = takes[0].__name__ if takes else "no"
        raise ValueError(f"interference={name!r} takes {needed} coefficients, not {types}")
    return FORMS[name](pairs, coefficients, bandwidths)


def _shares_of(bandwidths: HasBandwidth) -> Callable[[str, Phase, int], float]:
    """Returns B by module, phase and quota on one device. A search asks for the same few again and again."""

    @cache
    def share(module: str, phase: Phase, quota: int) -> float:
        return bandwidths.bandwidth(module, phase, 1, quota)

    return share


class Bandwidths:
    """Measured shares of bandwidth, linear over the logarithm of the quota.

    A degree without samples takes the nearest sampled one, because the share that a module draws of one device hardly
    depends on the number of devices (the paper's B has no degree at all).
    """

    def __init__(self, samples: Iterable[Sample], *, idle: Iterable[tuple[str, Phase]] = ()) -> None:
        """Collects the samples that have a ``bandwidth_utilisation``.

        Args:
            samples: Samples of any modules, phases, degrees and quotas.
            idle: Modules with phases in which they do nothing, such as the backward of a frozen module.
        """
        self._points: dict[tuple[str, Phase], dict[int, dict[int, float]]] = {}
        for sample in samples:
            if sample.bandwidth_utilisation is not None:
                by_degree = self._points.setdefault((sample.module, sample.phase), {})
                by_degree.setdefault(sample.degree, {})[sample.quota] = sample.bandwidth_utilisation
        self._idle = frozenset(idle)

    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the share of the device's memory bandwidth that a module alone draws, 0 to 1.

        Raises:
            InvalidProfileError: Nothing is known of the module's bandwidth in this phase.
            ValueError: ``quota`` lies outside the measurements.
        """
        if (module, phase) in self._idle:
            return 0.0
        by_degree = self._points.get((module, phase), {})
        if not by_degree:
            raise InvalidProfileError(
                f"the bandwidth that {module!r} uses in its {phase} is not known; profile it with hardware counters"
            )
        points = by_degree[min(by_degree, key=lambda sampled: (abs(math.log(sampled / degree)), sampled))]
        if min(points) <= quota <= max(points):
            quotas, shares = zip(*sorted(points.items()), strict=True)
            return float(np.interp(math.log(quota), list(map(math.log, quotas)), shares))
        raise ValueError(
            f"bandwidth of {module!r} {phase}: a quota of {quota} slots lies outside the measured "
            f"{', '.join(map(str, sorted(points)))}; measure it there too"
        )
