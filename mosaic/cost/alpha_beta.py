"""Spindle's estimator of scaling: time as a fixed part and a part that is shared out, in pieces (its appendix A).

    T(n) = alpha_i + beta_i / n        for n in the i-th piece

``alpha_i`` holds what Spindle writes as alpha + beta * c (launches and what does not scale), ``beta_i`` its beta' * w;
a profile has no workloads of their own to tell them further apart. No coefficient is negative. Spindle does not
say how pieces meet; here they are continuous. Both together mean that T falls as n grows, though no faster
than n grows, so that "how many n for this time" has one answer.

At the knots such functions are v_(i+1) between v_i and v_i * n_i / n_(i+1): a cone, whose corners fall at each piece
either not at all or perfectly. A fit is a non-negative sum of these corners, by least squares of relative errors.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mosaic.cost.interference.fitting.least_squares import Matrix, nonnegative
from mosaic.cost.surfaces.surface import ScalingSurface
from mosaic.profile import Sample

MOST_PIECES = 3
"""More would follow the noise of ten quotas and four degrees."""

_MOST_KNOTS = 10  # places tried for a knot; pairs of them are enumerated
_LEAST_MS = 1e-6
_NOISE = 1e-3  # relative errors below this do not earn another piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of the function."""

    first: int
    """Least n."""
    last: int
    """Greatest n."""
    alpha_ms: float
    """What does not scale, in milliseconds; not negative."""
    beta_ms: float
    """What is shared out: milliseconds at n = 1; not negative."""

    def time_ms(self, n: float) -> float:
        """Returns alpha + beta / n, in milliseconds."""
        return self.alpha_ms + self.beta_ms / n


class AlphaBetaSurface:
    """A piecewise alpha-beta function behind the interface of a surface.

    It smooths: at a sample it returns the fit, not the median. Where it may be asked is where a
    ``ScalingSurface`` of the same samples may be.

    Attributes:
        pieces: By rising n.
    """

    def __init__(self, samples: Sequence[Sample], *, over: Literal["area", "degree"] = "area") -> None:
        """Fits one module and phase.

        Args:
            samples: At any degrees and quotas.
            over: What n counts: slots over all devices (degree times quota), or devices, each as a whole, as
                in Spindle; the latter takes only the samples at the greatest quota.

        Raises:
            InvalidProfileError: There are no feasible samples, two of one point, or they are not all of
                one module and phase.
        """
        if over == "degree":
            whole = max((sample.quota for sample in samples), default=0)
            samples = [sample for sample in samples if sample.quota == whole]
        self._over = over
        self._sampled = ScalingSurface(samples)
        feasible = [sample for sample in samples if sample.infeasible is None]
        counts = [self._n(sample.degree, sample.quota) for sample in feasible]
        self.pieces = _fit(counts, [max(sample.median_ms, _LEAST_MS) for sample in feasible])
        self._is_zero = all(sample.median_ms == 0 for sample in feasible)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Data-parallel degrees with feasible samples, rising."""
        return self._sampled.degrees

    def quotas(self, degree: int) -> tuple[int, ...]:
        """Returns the quotas in slots that can be asked for at a sampled degree, rising; see ``ScalingSurface``."""
        return self._sampled.quotas(degree)

    def time_ms(self, degree: int, quota: int) -> float:
        """Returns the fitted time in milliseconds, alone on the device.

        Raises:
            ValueError: Outside what was sampled, or where the module cannot run.
        """
        self._sampled.time_ms(degree, quota)  # refuses what was not sampled
        return self.at(self._n(degree, quota))

    def at(self, n: float) -> float:
        """Returns T(n) in milliseconds; ``n`` need not be whole.

        Raises:
            ValueError: ``n`` lies outside the pieces.
        """
        first, last = self.pieces[0].first, self.pieces[-1].last
        if not first <= n <= last:
            raise ValueError(f"n={n} lies outside the sampled {first} to {last}; nothing is extrapolated")
        index = bisect_left(self.pieces, n, key=lambda piece: piece.last)
        return 0.0 if self._is_zero else self.pieces[index].time_ms(n)

    def inverse(self, time_ms: float, allocations: Sequence[int] | None = None) -> float:
        """Returns how many n take ``time_ms``: between the two nearest valid allocations, linearly (Spindle Eq. 11).

        Args:
            time_ms: Time that is aimed at, in milliseconds.
            allocations: Valid n; by default every whole one that was enclosed by samples.

        Returns:
            The least allocation where that is already fast enough.

        Raises:
            ValueError: Not even the greatest allocation is as fast.
        """
        first, last = self.pieces[0].first, self.pieces[-1].last
        valid = sorted(set(allocations if allocations is not None else range(first, last + 1)))
        times = [self.at(n) for n in valid]
        if not time_ms >= times[-1]:
            raise ValueError(f"{time_ms} ms is less than {times[-1]:.6g} ms, the time at {valid[-1]}; aim higher")
        upper = next(index for index, found in enumerate(times) if found <= time_ms)
        if upper == 0:
            return float(valid[0])
        low, high = valid[upper - 1], valid[upper]
        slow, fast = times[upper - 1], times[upper]
        # Eq. 11, written so that rounding does not leave the two.
        return low + (slow - time_ms) / (slow - fast) * (high - low)

    def _n(self, degree: int, quota: int) -> int:
        return degree * quota if self._over == "area" else degree


def _fit(counts: Sequence[int], times_ms: Sequence[float]) -> tuple[Piece, ...]:
    """Takes as many pieces as Akaike's criterion, corrected for few samples, says are worth their knots."""
    best: tuple[float, tuple[Piece, ...]] = (math.inf, ())
    for knots in _knots(sorted(set(counts))):
        num_free = 2 * (len(knots) - 1)  # values at the knots, and where the inner ones are
        spare = len(counts) - num_free - 1
        if len(knots) > 2 and spare < 1:
            continue
        pieces, error = _fit_pieces(knots, np.array(counts, dtype=float), np.array(times_ms))
        penalty = 2 * num_free + (2 * num_free * (num_free + 1) / spare if len(knots) > 2 else 0)
        score = len(counts) * math.log(error + _NOISE**2) + penalty
        if score < best[0]:
            best = (score, pieces)
    return best[1]


def _knots(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if len(counts) == 1:
        yield (counts[0], counts[0])
        return
    inner = counts[1:-1]
    step = max(1, math.ceil(len(inner) / _MOST_KNOTS))
    for num in range(MOST_PIECES):
        for chosen in itertools.combinations(inner[::step], num):
            yield (counts[0], *chosen, counts[-1])


def _fit_pieces(knots: Sequence[int], counts: Matrix, times_ms: Matrix) -> tuple[tuple[Piece, ...], float]:
    """Returns the pieces between given knots, and the mean of their squared relative errors."""
    if knots[0] == knots[-1]:
        mean = float(times_ms.mean())
        return (Piece(first=knots[0], last=knots[0], alpha_ms=mean, beta_ms=0.0),), 0.0
    falls = [(1.0, before / after) for before, after in itertools.pairwise(knots)]
    corners = np.array([[1.0, *itertools.accumulate(choice, float.__mul__)] for choice in itertools.product(*falls)])
    places = [-1 / n for n in knots]
    columns = np.array([np.interp(-1 / counts, places, corner) for corner in corners]).T
    weights = nonnegative(columns / times_ms[:, None], np.ones(len(counts)))
    values = weights @ corners
    pieces = tuple(
        _through(first, float(values[i]), last, float(values[i + 1]))
        for i, (first, last) in enumerate(itertools.pairwise(knots))
    )
    return pieces, float(np.mean((columns @ weights / times_ms - 1) ** 2))


def _through(first: int, first_ms: float, last: int, last_ms: float) -> Piece:
    beta = max(0.0, (first_ms - last_ms) / (1 / first - 1 / last))
    return Piece(first=first, last=last, alpha_ms=max(0.0, first_ms - beta / first), beta_ms=beta)
