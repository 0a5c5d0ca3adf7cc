"""Data-parallel degrees to measure, and degrees between them to plan with.

Measuring or counting every degree takes long, and times between two of them are smooth, so powers of two and the number
of devices are measured. Plans may use every whole number between them up to 16, and beyond that four in each doubling
(20, 24, 28, 32, 40, ...): neighbours differ by a quarter there at most, and an exact search of 32 degrees in the place
of 20 takes five times as long.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_ALL_UP_TO = 16


def degrees_to_measure(num_devices: int) -> tuple[int, ...]:
    """Returns the degrees to measure or count: the powers of two up to a number of devices, and that number."""
    powers = (1 << power for power in range(num_devices.bit_length()))
    return tuple(sorted({*powers, num_devices}))


def degrees_between(sampled: Sequence[int]) -> tuple[int, ...]:
    """Returns the degrees to offer, rising: the sampled ones, and others between them."""
    offered = set(sampled)
    degree = min(sampled)
    while degree < max(sampled):
        offered.add(degree)
        degree += 1 if degree < _ALL_UP_TO else (1 << degree.bit_length() - 1) // 4
    return tuple(sorted(offered))


def neighbours(sampled: Sequence[int], degree: int) -> tuple[int, int]:
    """Returns the sampled degrees next to ``degree``, which is both if it is sampled; ``sampled`` rises.

    Raises:
        ValueError: It is below the least or above the greatest.
    """
    if not sampled or not sampled[0] <= degree <= sampled[-1]:
        raise ValueError(f"degree {degree} lies outside {', '.join(map(str, sampled)) or 'none'}")
    return sampled[bisect_right(sampled, degree) - 1], sampled[bisect_left(sampled, degree)]


def between_ms(low_ms: float, high_ms: float, low: int, high: int, at: int) -> float:
    """Returns the time at a degree, or number of samples, from those at two around it: a straight line in log-log."""
    if low == high or low_ms <= 0 or high_ms <= 0:
        return low_ms
    share = math.log(at / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(low_ms) + share * math.log(high_ms))
