"""Spindle's allocation for modules that run in parallel: real numbers of devices first, then two whole ones each.

Spindle (ASPLOS 2025, arXiv 2409.03365), section 3.3: with devices and operators relaxed to real numbers all MetaOps of
a level start and end together (malleable project scheduling, MPSP), and that end is found by bisection (appendix B,
Algorithm 2). Between two degrees the inverse of a MetaOp's time is interpolated, in either of two ways:

* ``time``, appendix B, Eq. 11: linear in the time. Undefined below the first degree; there we take ``speedup``'s line.
* ``speedup``, as in the authors' released planner: linear in s(n) = T(1) / T(n), with s(0) = 0. Only this one gives
  the paper's own example (8.4 and 3.6 of 12 operators), so it is the default.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Interpolation = Literal["speedup", "time"]

_TOLERANCE = 1e-9
"""Relative; within it a number of devices counts as whole, and the bisection ends (the paper's epsilon)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaOp:
    """A chain of equal operators, and how one of them scales over devices."""

    degrees: tuple[int, ...]
    """Numbers of devices that it may have, rising."""
    times: tuple[float, ...]
    """T(n): time of one operator at each of them, falling; in any one unit."""
    num_operators: int
    """L, its operators."""

    def __post_init__(self) -> None:
        falls = all(after < before for before, after in pairwise(self.times))
        if not self.degrees or len(self.degrees) != len(self.times) or not falls or self.times[-1] < 0:
            raise ValueError(
                f"degrees={self.degrees}, times={self.times}; a MetaOp has a time for each degree, and they fall"
            )

    def time(self, degree: int) -> float:
        """Returns T(degree); the degree is one of ``degrees``."""
        return self.times[self.degrees.index(degree)]

    def devices_for(self, time: float, interpolation: Interpolation = "speedup") -> float:
        """Returns the real number of devices with which one operator takes ``time`` (``Find_Inverse_Value``).

        Args:
            time: Positive. Below the least time that it can have, the largest degree is returned.
            interpolation: See the module's docstring.
        """
        if time >= self.times[0]:  # s(0) = 0: time shared, as a part of the first degree
            return self.degrees[0] * self.times[0] / time
        # times fall: the first one that is at most `time`
        above = min(bisect_left(self.times, -time, key=lambda value: -value), len(self.times) - 1)
        low, high = self.times[above - 1] if above else self.times[0], self.times[above]
        if time <= high or not above:
            return float(self.degrees[above])
        if interpolation == "time":  # Eq. 11
            part = (low - time) / (low - high)
        else:  # part of the way from s(n_low) = 1/low to s(n_high) = 1/high, in units of T(1)
            part = (1 / time - 1 / low) / (1 / high - 1 / low) if high > 0 else 0.0
        return self.degrees[above - 1] + (self.degrees[above] - self.degrees[above - 1]) * part


@dataclass(frozen=True, slots=True, kw_only=True)
class AslTuple:
    """Some operators of a MetaOp on a whole number of devices: the paper's <n, s, l> before s, the start, is known."""

    degree: int
    """n, devices."""
    count: float
    """l, operators; a real number before they are rounded."""


def continuous_optimum(
    metaops: Sequence[MetaOp], num_devices: int, interpolation: Interpolation = "speedup"
) -> tuple[float, tuple[float, ...]]:
    """Returns C*, the least time in which all MetaOps end together, and the devices that each has until then.

    Appendix B, Algorithm 2 (line 6's sum is the one over n_m). Units are those of the MetaOps' times.

    Args:
        metaops: At least one; none has a degree above ``num_devices``.
        num_devices: N.
        interpolation: See the module's docstring.
    """

    def devices(end: float) -> list[float]:
        return [
            metaop.devices_for(end / metaop.num_operators, interpolation) if metaop.times[0] > 0 and end > 0 else 0.0
            for metaop in metaops
        ]

    low = max(metaop.times[-1] * metaop.num_operators for metaop in metaops)  # line 2
    high = sum(metaop.times[0] * metaop.num_operators for metaop in metaops)
    if sum(devices(low)) <= num_devices:
        return low, tuple(devices(low))
    while high - low > _TOLERANCE * high:  # line 3
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if sum(devices(middle)) < num_devices:  # line 6
            high = middle
        else:
            low = middle
    return high, tuple(devices(high))


def two_points(metaop: MetaOp, devices: float, end: float) -> tuple[AslTuple, ...]:
    """Splits a MetaOp with a real number of devices into one tuple below and one above, that together take ``end``.

    Section 3.3's bi-point discretisation, not yet rounded:
    l_high + l_low = L and T(n_high) l_high + T(n_low) l_low = C*.
    Below the first degree, n_low = 0 stands for idling and only the other tuple is left.
    """
    for degree in metaop.degrees:
        if abs(devices - degree) <= _TOLERANCE * degree * 10:
            return (AslTuple(degree=degree, count=metaop.num_operators),)
    above = min(bisect_left(metaop.degrees, devices), len(metaop.degrees) - 1)
    high = metaop.degrees[above]
    if not above:
        return (AslTuple(degree=high, count=metaop.num_operators),)
    low = metaop.degrees[above - 1]
    count = (metaop.num_operators * metaop.time(low) - end) / (metaop.time(low) - metaop.time(high))
    count = min(max(count, 0.0), float(metaop.num_operators))
    return (AslTuple(degree=high, count=count), AslTuple(degree=low, count=metaop.num_operators - count))


def rounded(tuples: Sequence[AslTuple], num_operators: int) -> tuple[AslTuple, ...]:
    """Rounds the first tuple's operators to the nearest whole number; the second takes the rest; empty ones go."""
    first = AslTuple(degree=tuples[0].degree, count=round(tuples[0].count))
    rest = [AslTuple(degree=other.degree, count=num_operators - int(first.count)) for other in tuples[1:]]
    return tuple(one for one in (first, *rest) if one.count > 0)
