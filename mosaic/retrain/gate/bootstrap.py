"""Confidence of a mean difference by a paired bootstrap over groups of rows, valid for few groups or differences.

The statistic is the mean over all rows of ``new - old``: resampled groups, the sum of their differences over the sum of
their rows. Two corrections prevent overconfidence:

* *Few groups.* Percentiles move further out, as Student's t requires for the number of groups (Hesterberg, What
  Teachers Should Know about the Bootstrap, 2014, "expanded percentiles"). Groups of unequal size count as fewer.
* *Few differences.* Two models that agree on ten rows prove little. So one group a whole value better and one
  a whole value worse are added (cf. Bonett and Price 2012 for paired proportions), and one row more on the side that a
  bound looks to. A whole value is the root mean square of the old values; the added groups have as many rows as a
  group of the usual size is worth, given how alike the old values within groups are.

Groups are ordered by size and sum before they are drawn, and draws do not depend on values. So the order of rows
does not matter, and if no row of a challenger is worse than that of another, no bound of it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from mosaic.retrain.gate.scores import Pair

MAX_WEIGHTS = 4_000_000
"""Numbers in memory at once, 32 MB; more groups need several batches."""
NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resampled:
    """The mean difference of a pair, and its resampled distribution."""

    difference: float
    """Mean of ``new - old`` over the rows."""
    lows: NDArray[np.float64]
    """Means of resampled groups with one row more that is worse, in order of size."""
    highs: NDArray[np.float64]
    """The same with one row more that is better."""
    one_row: float
    """Change of the mean by a row that is a whole value better or worse."""
    num_clusters: int
    """Groups of rows."""
    effective_clusters: float
    """Groups of equal size with the same information."""

    def low(self, confidence: float) -> float:
        """Returns the lower bound of the true difference, at a one-sided confidence."""
        return float(self.lows[max(self._rank(confidence), 0)])

    def high(self, confidence: float) -> float:
        """Returns the upper bound of the true difference, at a one-sided confidence."""
        return float(self.highs[-1 - max(self._rank(confidence), 0)])

    def chance_not_below(self, limit: float) -> float:
        """Returns the p-value of "the true difference is at least ``limit``"; 0 where no resample is."""
        share = float(np.mean(self.highs >= limit))
        if not 0 < share < 1:
            return share
        factor = _few_groups(self.effective_clusters)
        return NORMAL.cdf(normal_of_student(NORMAL.inv_cdf(share) / factor, self.effective_clusters - 1))

    @property
    def standard_error(self) -> float:
        """Standard error of the mean difference."""
        return float(self.lows.std()) * _few_groups(self.effective_clusters)

    def _rank(self, confidence: float) -> int:
        share = NORMAL.cdf(-expanded(confidence, self.effective_clusters))
        return math.floor(share * (len(self.lows) + 1)) - 1


def resample(pair: Pair, resamples: int, seed: int) -> Resampled:
    """Resamples the groups of a pair with at least one row; 2000 times 2000 groups take 40 ms and 32 MB."""
    sizes, sums = _groups(pair.new - pair.old, pair.cluster)
    order = np.lexsort((sums, sizes))
    whole = math.sqrt(math.fsum(pair.old**2) / len(pair.old))
    worth = 1 + (len(pair.old) / len(sizes) - 1) * alikeness(pair)
    rows = np.concatenate([sizes[order], [worth, worth, 1.0]])
    gains = np.concatenate([sums[order], [whole * worth, -whole * worth, 0.0]])
    batches = [
        (weights @ gains, weights @ rows, whole * weights[:, -1]) for weights in _turns(len(rows), resamples, seed)
    ]
    total, count, one_row = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Resampled(
        difference=math.fsum(sums) / len(pair.old),
        lows=np.sort((total - one_row) / count),
        highs=np.sort((total + one_row) / count),
        one_row=whole / len(pair.old),
        num_clusters=len(sizes),
        effective_clusters=float(np.sum(sizes) ** 2 / np.sum(sizes**2)),
    )


def alikeness(pair: Pair) -> float:
    """Returns the intraclass correlation of old values from analysis of variance, 0 to 1."""
    rows = len(pair.old)
    values = pair.old - math.fsum(pair.old) / rows
    sizes, sums = _groups(values, pair.cluster)
    number = len(sizes)
    if number in (1, rows):
        return float(number < rows)
    between = math.fsum(sums**2 / sizes)
    within = (math.fsum(values**2) - between) / (rows - number)
    between /= number - 1
    usual = (rows - float(np.sum(sizes**2)) / rows) / (number - 1)
    total = between + (usual - 1) * within
    return min(1.0, max(0.0, (between - within) / total)) if total > 0 else 0.0


def expanded(confidence: float, clusters: float) -> float:
    """Returns the distance of a bound in standard deviations of resampled means, for a number of groups."""
    return student_of_normal(NORMAL.inv_cdf(confidence), clusters - 1) * _few_groups(clusters)


def student_of_normal(deviations: float, degrees: float) -> float:
    """Returns the quantile of Student's t for the normal quantile ``deviations``.

    Wallace's approximation (1959): from 4 degrees of freedom on 0.2 % too wide at 95 %, 3 % at 99.9 %; wider below.
    """
    if degrees <= 0:
        return math.copysign(math.inf, deviations)
    scaled = (deviations * (8 * degrees + 3) / (8 * degrees + 1)) ** 2 / degrees
    return math.copysign(math.sqrt(degrees * math.expm1(scaled)) if scaled < 700 else math.inf, deviations)


def normal_of_student(quantile: float, degrees: float) -> float:
    """Returns the normal quantile for the quantile ``quantile`` of Student's t."""
    if degrees <= 0:
        return 0.0
    deviations = math.sqrt(degrees * math.log1p(quantile**2 / degrees)) * (8 * degrees + 1) / (8 * degrees + 3)
    return math.copysign(deviations, quantile)


def _few_groups(clusters: float) -> float:
    """Factor by which resampled means of few groups spread too little."""
    return math.sqrt(clusters / (clusters - 1)) if clusters > 1 else 1.0


def _groups(values: NDArray[np.float64], cluster: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
    """Returns the rows and the sum of values of each group, independent of the order of rows."""
    order = np.lexsort((values, cluster))
    starts = np.flatnonzero(np.diff(cluster[order], prepend=-1))
    sizes = np.diff(starts, append=len(order)).astype(np.float64)
    return sizes, np.add.reduceat(values[order], starts)


def _turns(groups: int, resamples: int, seed: int) -> Iterator[NDArray[np.float64]]:
    size = max(1, MAX_WEIGHTS // groups)
    for first in range(0, resamples, size):
        yield _weights(groups, first, min(size, resamples - first), seed)


@lru_cache(maxsize=3)  # a day compares several pairs on the same rows
def _weights(groups: int, first: int, count: int, seed: int) -> NDArray[np.float64]:
    """Returns the count of each group in ``count`` resamples from the ``first`` on."""
    draws = np.random.default_rng((seed, first)).integers(0, groups, size=(count, groups))
    draws += np.arange(count)[:, None] * groups
    return np.bincount(draws.ravel(), minlength=count * groups).reshape(count, groups).astype(np.float64)
