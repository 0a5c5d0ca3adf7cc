"""Time of one phase of a module over data-parallel degree and SM quota, interpolated between samples.

Over the quota, a monotone cubic (PCHIP: Fritsch and Carlson, 1980) interpolates the medians in 1/quota, in which work
that scales with the slots is linear and launches and saturated bandwidth are constant. A monotone curve has no spurious
minima for a solver to exploit. Over the degree, neighbouring curves are interpolated linearly in log-log. Nothing is
extrapolated.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence

from mosaic.cost.degrees import between_ms, neighbours
from mosaic.errors import InvalidProfileError
from mosaic.profile import Sample

NOISE_FLOOR = 0.02
"""Share of a median within which a rise always counts as noise."""
_MIN_MS = 1e-6
"""Replaces a measured zero, whose logarithm is infinite."""


class ScalingSurface:
    """Time of one phase of one module over (degree, quota); paper section 3.3, Eq. 6.

    At a sample the surface returns the sample's median, except for noise: medians that *rise* with the quota by at most
    the quartiles of the measurements (or two percent) are averaged until they no longer rise. A larger rise is real
    (extra threads or waves without gain) and stays, because a planner must not assign slots that slow a module down. An
    infeasible sample has no time, nor has the range to the next feasible sample.

    Raises:
        InvalidProfileError: No sample is feasible.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._subject = f"{samples[0].module!r} {samples[0].phase}"
        by_degree: dict[int, list[Sample]] = {}
        for sample in samples:
            by_degree.setdefault(sample.degree, []).append(sample)
        self._samples = {degree: sorted(by_degree[degree], key=lambda s: s.quota) for degree in sorted(by_degree)}
        feasible = {degree: [s for s in group if s.infeasible is None] for degree, group in self._samples.items()}
        self._curves = {degree: _curve(group) for degree, group in feasible.items() if group}
        if not self._curves:
            raise InvalidProfileError(f"{self._subject} cannot run at any quota: {samples[0].infeasible}")
        self._is_zero = all(s.median_ms == 0 for group in feasible.values() for s in group)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Data-parallel degrees with feasible samples, increasing."""
        return tuple(self._curves)

    def quotas(self, degree: int) -> tuple[int, ...]:
        """Returns the quotas of a degree in slots, increasing; between two sampled degrees, those of both.

        Raises:
            ValueError: The degree is outside the sampled range, or beside a degree at which the module cannot run.
        """
        around = set(self._bracket(degree))
        if not around <= self._curves.keys():
            raise ValueError(f"{self._subject} has no samples at degree {degree}, only at {_listed(self.degrees)}")
        first = max(min(self._curves[near]) for near in around)
        last = min(max(self._curves[near]) for near in around)
        return tuple(q for q in range(first, last + 1) if all(self._failure(near, q) is None for near in around))

    def time_ms(self, degree: int, quota: int) -> float:
        """Returns the time alone on the device, in milliseconds.

        Raises:
            ValueError: ``degree`` or ``quota`` is outside the samples, or the module cannot run there; has the recorded
                reason.
        """
        lower, upper = self._bracket(degree)
        low_ms = self._on_curve(lower, quota)
        if lower == upper or self._is_zero:
            return low_ms
        return between_ms(low_ms, self._on_curve(upper, quota), lower, upper, degree)

    def _bracket(self, degree: int) -> tuple[int, int]:
        degrees = tuple(self._samples)
        if not degrees[0] <= degree <= degrees[-1]:
            raise ValueError(
                f"{self._subject}: degree {degree} is outside the sampled degrees {_listed(degrees)}; "
                f"profile it at degree {degree} too"
            )
        return neighbours(degrees, degree)

    def _on_curve(self, degree: int, quota: int) -> float:
        reason = self._failure(degree, quota)
        if reason is not None:
            raise ValueError(f"{self._subject} cannot run at degree {degree}, quota {quota}: {reason}")
        curve = self._curves[degree]
        if quota not in curve:
            sampled = [sample.quota for sample in self._samples[degree] if sample.infeasible is None]
            raise ValueError(
                f"{self._subject}: a quota of {quota} slots is outside the sampled quotas {_listed(sampled)} "
                f"of degree {degree}; profile more quotas (`mosaic profile --quotas all`) or use one within them"
            )
        return 0.0 if self._is_zero else curve[quota]

    def _failure(self, degree: int, quota: int) -> str | None:
        """Returns the reason why the module cannot run; between two samples, that of either."""
        samples = self._samples[degree]
        right = bisect_left(samples, quota, key=lambda sample: sample.quota)
        is_sampled = right < len(samples) and samples[right].quota == quota
        near = samples[right : right + 1] if is_sampled else samples[max(0, right - 1) : right + 1]
        return next((sample.infeasible for sample in near if sample.infeasible is not None), None)


def _curve(samples: Sequence[Sample]) -> dict[int, float]:
    """Returns milliseconds at every quota between the first and the last sample."""
    quotas = [sample.quota for sample in samples]
    knots = dict(zip(quotas, (max(time, _MIN_MS) for time in pool_noise(samples)), strict=True))
    if len(quotas) == quotas[-1] - quotas[0] + 1:
        return knots
    from scipy.interpolate import PchipInterpolator  # 0.5 s to import

    every = range(quotas[0], quotas[-1] + 1)
    smooth = PchipInterpolator([-1 / quota for quota in quotas], list(knots.values()))([-1 / quota for quota in every])
    times = dict(zip(every, map(float, smooth), strict=True))
    for left, right in itertools.pairwise(knots.items()):
        for quota in range(left[0] + 1, right[0]):
            low, high = time_bounds(quota, left, right)
            times[quota] = min(max(times[quota], low), high)
    return times | knots


def time_bounds(quota: int, left: tuple[int, float], right: tuple[int, float]) -> tuple[float, float]:
    """Returns bounds of the time at a quota between two samples, in milliseconds.

    Time does not rise with the quota, and falls at most in proportion to it. Samples that violate the second rule are
    the bounds themselves.

    Args:
        quota: Slots, between those of both samples.
        left: Slots and milliseconds of the sample with fewer slots.
        right: Slots and milliseconds of the sample with more slots.
    """
    low, high = sorted((left[1], right[1]))
    if right[1] <= left[1] and left[0] * left[1] <= right[0] * right[1]:
        return max(low, left[0] * left[1] / quota), min(high, right[0] * right[1] / quota)
    return low, high


def pool_noise(samples: Sequence[Sample]) -> list[float]:
    """Returns the medians of samples by increasing quota, in milliseconds, with noisy rises averaged.

    Isotonic regression by pooling adjacent violators (Ayer et al., 1955), while the mean of a pool is within the spread
    of each member.
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
    # a pool of one returns its exact median
    return pool[0].median_ms if len(pool) == 1 else math.fsum(sample.median_ms for sample in pool) / len(pool)


def _is_within_spread(time_ms: float, sample: Sample) -> bool:
    first, third = sample.quartiles_ms
    median = sample.median_ms
    return min(first, median * (1 - NOISE_FLOOR)) <= time_ms <= max(third, median * (1 + NOISE_FLOOR))


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
