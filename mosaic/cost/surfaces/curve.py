"""Time over the quota of one phase of a module at one degree, between the samples.

A curve runs through the medians over 1/quota, by monotone cubic pieces (Fritsch and Carlson, 1980).
Over 1/quota, because what does not scale (launches, a bandwidth that is used up) and what does (work shared
out over the slots) are straight lines there, and so is their sum, at any two samples; over log-log the sum is not, and
sparse grids came out up to twice as far off. Cubic pieces limited to the shape of the data, because anything
freer would invent dips that a solver then goes and plans on: a time lies between those of its neighbouring samples (so
it is positive, and never below a launch floor that was measured), and no quota is worth more than its slots.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.profile import Sample

NOISE_FLOOR = 0.02
"""Share of a median within which a rise always counts as noise, however few measurements were taken."""

_MIN_MS = 1e-6
"""A measured zero stands for less than a clock tick; one nanosecond keeps its logarithm finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaCurve:
    """Time over quota at one degree."""

    quotas: tuple[int, ...]
    """Sampled quotas in slots, rising."""
    knots_ms: tuple[float, ...]
    """Fitted time at each of them, in milliseconds."""
    slopes: tuple[float, ...]
    """d time / d(-1/quota) at each of them, in milliseconds times slots; not above 0 where time falls."""

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> QuotaCurve:
        """Fits the samples of one module, phase and degree, each of another quota."""
        ordered = sorted(samples, key=lambda sample: sample.quota)
        knots = [max(time, _MIN_MS) for time in pool_noise(ordered)]
        slopes = _monotone_slopes([-1 / sample.quota for sample in ordered], knots)
        return cls(quotas=tuple(s.quota for s in ordered), knots_ms=tuple(knots), slopes=slopes)

    def ms(self, quota: int) -> float:
        """Returns the time in milliseconds; ``quota`` lies between the first and the last sampled one."""
        right = bisect_left(self.quotas, quota)
        if self.quotas[right] == quota:
            return self.knots_ms[right]
        left = right - 1
        x0, width = -1 / self.quotas[left], 1 / self.quotas[left] - 1 / self.quotas[right]
        t = (-1 / quota - x0) / width
        bend0, bend1 = self.slopes[left] * width, self.slopes[right] * width
        rise = self.knots_ms[right] - self.knots_ms[left]
        cubic = bend0 + t * ((3 * rise - 2 * bend0 - bend1) + t * (bend0 + bend1 - 2 * rise))
        low, high = roofs_ms(
            quota, (self.quotas[left], self.knots_ms[left]), (self.quotas[right], self.knots_ms[right])
        )
        return min(max(self.knots_ms[left] + t * cubic, low), high)


def roofs_ms(quota: int, left: tuple[int, float], right: tuple[int, float]) -> tuple[float, float]:
    """Returns the least and the most time that a quota between two samples can take, in milliseconds.

    Time does not rise with the quota, and does not fall faster than the quota grows: so a module that scales
    perfectly down to its floor is known exactly. Samples that break the second rule themselves bound with their values
    alone.

    Args:
        quota: Slots, between both.
        left: Slots and milliseconds of the sample with fewer slots.
        right: Those of the one with more.
    """
    low, high = sorted((left[1], right[1]))
    if right[1] <= left[1] and left[0] * left[1] <= right[0] * right[1]:
        return max(low, left[0] * left[1] / quota), min(high, right[0] * right[1] / quota)
    return low, high


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
