"""The part of a module's time that neither slots nor bandwidth make shorter: launches, dependent steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_GRID = 100
_FEWEST = 3  # quotas; two say nothing about a bend


class Timed(NamedTuple):
    """A module alone at one quota."""

    quota: int
    """Slots."""
    time_ms: float
    """Its time."""
    share: float
    """Share of the device's bandwidth that it used."""


def fixed_time(points: Sequence[Timed]) -> float:
    """Returns the fixed time as a multiple of what the module's traffic takes at full bandwidth; 0 where it is unknown.

    A roofline over quotas: time = fixed + max(work / quota, traffic), with the traffic known from time and bandwidth.
    Fixed is the value on a grid with the least mean relative error. Where a module stops scaling although there is
    bandwidth left, that counts as fixed: it does not draw more, so less bandwidth does not slow it down either.

    Args:
        points: Of different quotas; fewer than three tell nothing.
    """
    used = sorted(point for point in points if point.share > 0 and point.time_ms > 0)
    if len(used) < _FEWEST:
        return 0.0
    traffic = statistics.median(point.share * point.time_ms for point in used)
    quotas = np.array([float(point.quota) for point in used])
    times = np.array([point.time_ms for point in used])
    fixed = np.linspace(0, max(0.0, float(times.min()) - traffic), _GRID)[:, None]
    # Work from the quotas at which it is not the traffic that takes longest; by least squares of relative errors.
    paced = times - fixed
    weights = np.where(paced > 1.02 * traffic, 1 / (quotas * times), 0.0)
    weights[~weights.any(axis=1)] = 1 / (quotas * times)
    work = (weights * paced / times).sum(axis=1) / (weights**2).sum(axis=1)
    errors = np.abs(fixed + np.maximum(work[:, None] / quotas, traffic) - times) / times
    best = int(errors.mean(axis=1).argmin())
    return float(fixed[best, 0]) / traffic
