"""How long one phase of a module takes on ``degree`` devices with ``quota`` slots of each, between the samples.

Along the quota runs a ``QuotaCurve``. Across degrees, sampled at powers of two, neighbouring curves are joined linearly
in log-log.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

from mosaic.cost.surfaces.curve import QuotaCurve
from mosaic.errors import InvalidProfileError
from mosaic.profile import Phase, Sample


class Curve(Protocol):
    """Time over the quota at one degree."""

    @property
    def quotas(self) -> tuple[int, ...]:
        """Sampled quotas in slots, rising."""

    def ms(self, quota: int) -> float:
        """Returns the time in milliseconds between the first and the last sampled quota."""


class Surface(Protocol):
    """A form of one phase of one module over (degree, quota)."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Sampled data-parallel degrees, rising."""

    def quotas(self, degree: int) -> tuple[int, ...]:
        """Returns the quotas in slots that can be asked for at a sampled degree, rising."""

    def time_ms(self, degree: int, quota: int) -> float:
        """Returns the time in milliseconds; ValueError outside what was sampled or where it cannot run."""


class ScalingSurface:
    """Time of one phase of one module over (degree, quota); paper section 3.3, Eq. 6.

    At a sample it returns the sample's median. The one exception is noise: where a median *rises* with the quota
    by no more than the measurements' own quartiles (or two percent), neighbours are averaged until
    it no longer does. A rise beyond that is real (threads or waves that do not pay) and is kept: a planner that
    believed otherwise would hand out slots that make a module slower.

    Where a sample is infeasible there is no time, nor between it and the next sample that is feasible.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Fits a surface to samples that all are of one module and phase.

        Raises:
            InvalidProfileError: There are no feasible samples, two of one point, or they are not all of
                one module and phase.
        """
        self.module, self.phase = subject_of(samples)
        by_degree: dict[int, list[Sample]] = {}
        for sample in samples:
            by_degree.setdefault(sample.degree, []).append(sample)
        self._samples = {degree: sorted(by_degree[degree], key=lambda s: s.quota) for degree in sorted(by_degree)}
        feasible = {degree: [s for s in of if s.infeasible is None] for degree, of in self._samples.items()}
        self._curves: dict[int, Curve] = {degree: QuotaCurve.fit(of) for degree, of in feasible.items() if of}
        self._is_zero = all(s.median_ms == 0 for of in feasible.values() for s in of)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Data-parallel degrees with feasible samples, rising."""
        return tuple(self._curves)

    def quotas(self, degree: int) -> tuple[int, ...]:
        """Returns the quotas in slots that can be asked for at a sampled degree, rising.

        Raises:
            ValueError: The degree was not sampled.
        """
        if degree not in self._curves:
            raise ValueError(f"{self._subject} has no samples at degree {degree}, only at {_listed(self.degrees)}")
        sampled = self._curves[degree].quotas
        return tuple(q for q in range(sampled[0], sampled[-1] + 1) if self._reason(degree, q) is None)

    def time_ms(self, degree: int, quota: int) -> float:
        """Returns the time in milliseconds, alone on the device.

        Raises:
            ValueError: ``degree`` or ``quota`` lies outside what was sampled (nothing is extrapolated), or the module
                cannot run there; has the reason that was recorded.
        """
        lower, upper = self._bracket(degree)
        low_ms = self._on_curve(lower, quota)
        if lower == upper or self._is_zero:
            return low_ms
        high_ms = self._on_curve(upper, quota)
        share = math.log(degree / lower) / math.log(upper / lower)
        return math.exp((1 - share) * math.log(low_ms) + share * math.log(high_ms))

    def _bracket(self, degree: int) -> tuple[int, int]:
        degrees = tuple(self._samples)
        if not degrees[0] <= degree <= degrees[-1]:
            raise ValueError(
                f"{self._subject}: degree {degree} lies outside the sampled degrees {_listed(degrees)}; "
                f"profile it at degree {degree} too"
            )
        return degrees[bisect_right(degrees, degree) - 1], degrees[bisect_left(degrees, degree)]

    def _on_curve(self, degree: int, quota: int) -> float:
        reason = self._reason(degree, quota)
        if reason is not None:
            raise ValueError(f"{self._subject} cannot run at degree {degree}, quota {quota}: {reason}")
        curve = self._curves[degree]
        if not curve.quotas[0] <= quota <= curve.quotas[-1]:
            raise ValueError(
                f"{self._subject}: a quota of {quota} slots lies outside the sampled quotas {_listed(curve.quotas)} "
                f"of degree {degree}; profile more quotas (`mosaic profile --quotas all`) or ask within them"
            )
        return 0.0 if self._is_zero else curve.ms(quota)

    def _reason(self, degree: int, quota: int) -> str | None:
        """Why it cannot run; between two samples, what either of them says."""
        samples = self._samples[degree]
        right = bisect_left(samples, quota, key=lambda sample: sample.quota)
        exact = right < len(samples) and samples[right].quota == quota
        near = samples[right : right + 1] if exact else samples[max(0, right - 1) : right + 1]
        return next((sample.infeasible for sample in near if sample.infeasible is not None), None)

    @property
    def _subject(self) -> str:
        return f"{self.module!r} {self.phase}"


def subject_of(samples: Sequence[Sample]) -> tuple[str, Phase]:
    """Returns the module and the phase that all samples are of.

    Raises:
        InvalidProfileError: There is not exactly one, two samples are of one point, or none is feasible.
    """
    kinds = {(sample.module, sample.phase) for sample in samples}
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{module} {phase}" for module, phase in kinds)) or "no samples"
        raise InvalidProfileError(f"a scaling surface is of one module and phase; found {found}")
    ((module, phase),) = kinds
    points = sorted((sample.degree, sample.quota) for sample in samples)
    twice = next((first for first, second in itertools.pairwise(points) if first == second), None)
    if twice is not None:
        raise InvalidProfileError(
            f"{module!r} {phase} has two samples at degree {twice[0]}, quota {twice[1]}; keep one"
        )
    if all(sample.infeasible is not None for sample in samples):
        raise InvalidProfileError(f"{module!r} {phase} ran at no quota: {samples[0].infeasible}")
    return module, phase


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
