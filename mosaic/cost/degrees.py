"""Data-parallel degrees to measure, and degrees between them to plan with.

Times are smooth over degrees, so only powers of two and the number of devices are measured or counted. Plans may use
every degree up to 16, and beyond that four per doubling (20, 24, 28, 32, 40, ...), which differ by at most a quarter;
an exact search of 32 instead of 20 degrees takes five times as long.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_ALL_UP_TO = 16


def degrees_to_measure(num_devices: int) -> tuple[int, ...]:
    """Returns the degrees to measure or count: powers of two up to the number of devices, and that number."""
    powers = (1 << power for power in range(num_devices.bit_length()))
    return tuple(sorted({*powers, num_devices}))


def degrees_between(sampled: Sequence[int]) -> tuple[int, ...]:
    """Returns the degrees to plan with, increasing: the sampled ones and others between them."""
    offered = set(sampled)
    degree = min(sampled)
    while degree < max(sampled):
        offered.add(degree)
        degree += 1 if degree < _ALL_UP_TO else (1 << degree.bit_length() - 1) // 4
    return tuple(sorted(offered))


def neighbours(sampled: Sequence[int], degree: int) -> tuple[int, int]:
    """Returns the sampled degrees around ``degree``, or twice ``degree`` if it is sampled; ``sampled`` increases.

    Raises:
        ValueError: It is outside the sampled range.
    """
    if not sampled or not sampled[0] <= degree <= sampled[-1]:
        raise ValueError(f"degree={degree} is outside the sampled degrees {', '.join(map(str, sampled)) or 'none'}")
    return sampled[bisect_right(sampled, degree) - 1], sampled[bisect_left(sampled, degree)]


def between_ms(low_ms: float, high_ms: float, low: int, high: int, at: int) -> float:
    """Interpolates the time at a degree or number of samples between two others, linearly in log-log."""
    if low == high or low_ms <= 0 or high_ms <= 0:
        return low_ms
    share = math.log(at / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(low_ms) + share * math.log(high_ms))
