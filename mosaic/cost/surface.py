"""How long one phase of a module takes on ``degree`` devices with ``quota`` slots of each, between the samples.

Along the quota a curve runs through the medians in log-log space, by monotone cubic pieces (Fritsch and
Carlson, 1980). Log-log, because compute-bound parts are straight lines there (time falls as 1/quota), launch and
bandwidth floors are flat lines, and a time can never come out negative; cubic pieces limited to the shape of
the data, because anything freer would invent dips that a solver then goes and plans on.

Across degrees, sampled at powers of two, neighbouring curves are joined linearly in log-log.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.errors import InvalidProfileError
from mosaic.profile import Phase, Sample

NOISE_FLOOR = 0.02
"""Share of a median within which a rise always counts as noise, however few measurements were taken."""

_LEAST_MS = 1e-6
"""A measured zero stands for less than a clock tick; one nanosecond keeps its logarithm finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaCurve:
    """Time over quota at one degree."""

    quotas: tuple[int, ...]
    """Sampled quotas in slots, rising."""
    knots_ms: tuple[float, ...]
    """Fitted time at each of them, in milliseconds."""
    slopes: tuple[float, ...]
    """d log(time) / d log(quota) at each of them."""

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> QuotaCurve:
        """Fits the samples of one module, phase and degree."""
        ordered = sorted(samples, key=lambda sample: sample.quota)
        knots = [max(time, _LEAST_MS) for time in pool_noise(ordered)]
        xs = [math.log(sample.quota) for sample in ordered]
        slopes = _monotone_slopes(xs, [math.log(time) for time in knots])
        return cls(quotas=tuple(s.quota for s in ordered), knots_ms=tuple(knots), slopes=slopes)

    def ms(self, quota: int) -> float:
        """Returns the time in milliseconds; ``quota`` lies between the first and the last sampled one."""
        right = bisect_left(self.quotas, quota)
        if self.quotas[right] == quota:
            return self.knots_ms[right]
        left = right - 1
        x0, x1 = math.log(self.quotas[left]), math.log(self.quotas[right])
        y0, y1 = math.log(self.knots_ms[left]), math.log(self.knots_ms[right])
        width = x1 - x0
        t = (math.log(quota) - x0) / width
        bend0, bend1 = self.slopes[left] * width, self.slopes[right] * width
        rise = y1 - y0
        return math.exp(y0 + t * (bend0 + t * ((3 * rise - 2 * bend0 - bend1) + t * (bend0 + bend1 - 2 * rise))))


class ScalingSurface:
    """Time of one phase of one module over (degree, quota); paper section 3.3, Eq. 6.

    At a sample it returns the sample's median. The one exception is noise: where a median *rises* with the quota
    by no more than the measurements' own quartiles (or two percent), neighbours are averaged until
    it no longer does. A rise beyond that is real (threads or waves that do not pay) and is kept: a planner that
    believed otherwise would hand out slots that make a module slower.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Fits a surface to samples that all are of one module and phase.

        Raises:
            InvalidProfileError: There are no samples, or they are not all of one module and phase.
        """
        kinds = {(sample.module, sample.phase) for sample in samples}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{module} {phase}" for module, phase in kinds)) or "no samples"
            raise InvalidProfileError(f"a scaling surface is of one module and phase; found {found}")
        self.module: str
        self.phase: Phase
        ((self.module, self.phase),) = kinds
        by_degree: dict[int, list[Sample]] = {}
        for sample in samples:
            by_degree.setdefault(sample.degree, []).append(sample)
        self._curves = {degree: QuotaCurve.fit(by_degree[degree]) for degree in sorted(by_degree)}
        self._is_zero = all(sample.median_ms == 0 for sample in samples)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Sampled data-parallel degrees, rising."""
        return tuple(self._curves)

    def quotas(self, degree: int) -> range:
        """Returns the quotas in slots that can be asked for at a sampled degree.

        Raises:
            ValueError: The degree was not sampled.
        """
        if degree not in self._curves:
            raise ValueError(f"{self._subject} has no samples at degree {degree}, only at {_listed(self.degrees)}")
        sampled = self._curves[degree].quotas
        return range(sampled[0], sampled[-1] + 1)

    def time_ms(self, degree: int, quota: int) -> float:
        """Returns the time in milliseconds, alone on the device.

        Raises:
            ValueError: ``degree`` or ``quota`` lies outside what was sampled; nothing is extrapolated.
        """
        if self._is_zero:
            self._bracket(degree)
            return 0.0
        lower, upper = self._bracket(degree)
        low_ms = self._on_curve(lower, quota)
        if lower == upper:
            return low_ms
        high_ms = self._on_curve(upper, quota)
        share = math.log(degree / lower) / math.log(upper / lower)
        return math.exp((1 - share) * math.log(low_ms) + share * math.log(high_ms))

    def _bracket(self, degree: int) -> tuple[int, int]:
        degrees = self.degrees
        if not degrees[0] <= degree <= degrees[-1]:
            raise ValueError(
                f"{self._subject}: degree {degree} lies outside the sampled degrees {_listed(degrees)}; "
                f"profile it at degree {degree} too"
            )
        return degrees[bisect_right(degrees, degree) - 1], degrees[bisect_left(degrees, degree)]

    def _on_curve(self, degree: int, quota: int) -> float:
        curve = self._curves[degree]
        if not curve.quotas[0] <= quota <= curve.quotas[-1]:
            raise ValueError(
                f"{self._subject}: a quota of {quota} slots lies outside the sampled quotas {_listed(curve.quotas)} "
                f"of degree {degree}; profile more quotas (`mosaic profile --quotas all`) or ask within them"
            )
        return curve.ms(quota)

    @property
    def _subject(self) -> str:
        return f"{self.module!r} {self.phase}"


def pool_noise(samples: Sequence[Sample]) -> list[float]:
    """Returns the medians of samples in rising quota, in milliseconds, with rises that are only noise averaged out.

    Isotonic regression by pooling adjacent violators (Ayer et al., 1955), where a pool is allowed
    only while its mean stays within the spread of every member.
    """
    pools: list[list[Sample]] = []
    for sample in samples:
        pools.append([sample])
        while len(pools) > 1 and _mean_ms(pools[-2]) < _mean_ms(pools[-1]):
            joined = pools[-2] + pools[-1]
            mean = _mean_ms(joined)
            if not all(_is_within_spread(mean, member) for member in joined):
                break
            pools[-2:] = [joined]
    return [_mean_ms(pool) for pool in pools for _ in pool]


def _mean_ms(pool: Sequence[Sample]) -> float:
    # A pool of one must give its median back to the last bit.
    return pool[0].median_ms if len(pool) == 1 else math.fsum(sample.median_ms for sample in pool) / len(pool)


def _is_within_spread(time_ms: float, sample: Sample) -> bool:
    first, third = sample.quartiles_ms
    median = sample.median_ms
    return min(first, median * (1 - NOISE_FLOOR)) <= time_ms <= max(third, median * (1 + NOISE_FLOOR))


def _monotone_slopes(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, ...]:
    """Slopes with which cubic pieces keep the shape of the data (Fritsch and Butland, 1984)."""
    if len(xs) == 1:
        return (0.0,)
    widths = [right - left for left, right in itertools.pairwise(xs)]
    secants = [(ys[i + 1] - ys[i]) / widths[i] for i in range(len(widths))]
    inner = []
    for i in range(1, len(widths)):
        before, after = secants[i - 1], secants[i]
        if before * after <= 0:
            inner.append(0.0)
            continue
        weight0, weight1 = 2 * widths[i] + widths[i - 1], widths[i] + 2 * widths[i - 1]
        inner.append((weight0 + weight1) / (weight0 / before + weight1 / after))
    # At the ends, the slope of the last piece itself: nothing is known beyond.
    return (secants[0], *inner, secants[-1])


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
