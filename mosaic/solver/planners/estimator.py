"""Spindle's scalability estimator: times at every number of devices from a few that were looked at.

Spindle (arXiv 2409.03365), section 3.2 and appendix A: T(n) = alpha_i + beta_i c + beta'_i w / n for n between two
numbers of devices that were profiled, c what does not shrink with n, w what does. Of one MetaOp c and w are constants,
so a piece has two unknowns, alpha_i + beta_i c and beta'_i w, and the profiled times at its two ends give both.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseAlphaBeta:
    """Times of a MetaOp over numbers of devices."""

    degrees: tuple[int, ...]
    """Numbers of devices that were looked at, rising; at least one."""
    times: tuple[float, ...]
    """What it took at each of them, in any one unit."""

    def __post_init__(self) -> None:
        rises = all(before < after for before, after in pairwise(self.degrees))
        if not self.degrees or len(self.degrees) != len(self.times) or not rises:
            raise ValueError(f"degrees={self.degrees}, times={self.times}; give a time for each degree, which rise")

    def time(self, degree: int) -> float:
        """Returns the time at a degree from the first to the last that was looked at.

        Raises:
            ValueError: It lies outside these.
        """
        if not self.degrees[0] <= degree <= self.degrees[-1]:
            raise ValueError(f"degree={degree}; estimates go from {self.degrees[0]} to {self.degrees[-1]}")
        at = bisect_right(self.degrees, degree) - 1
        if self.degrees[at] == degree:
            return self.times[at]
        low, high = self.degrees[at], self.degrees[at + 1]
        shrinks = (self.times[at] - self.times[at + 1]) / (1 / low - 1 / high)
        return self.times[at] + shrinks * (1 / degree - 1 / low)


def looked_at(degrees: tuple[int, ...]) -> tuple[int, ...]:
    """Returns those of some degrees that are profiled: the first, the last, and powers of two."""
    return tuple(n for n in degrees if n in (degrees[0], degrees[-1]) or n & (n - 1) == 0)
