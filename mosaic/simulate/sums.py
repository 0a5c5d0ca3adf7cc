"""Sums of gradients beside a step: modules of one device share its network, so their buckets wait for each other.

A module's buckets become ready in equal parts of its backward, and each is summed as soon as all of its devices have
ended the sums that were ready before, as kernels on one stream do. Nothing but the step's end waits for them::

    a backward  |  1  |  2  |                      b backward  |    1    |    2    |      beside it
    network           |--a1--|--b1--|--a2--|--b2--|
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from mosaic.cost.communication import GradientSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """What is summed of one part."""

    start_ms: float
    """When its backward starts."""
    end_ms: float
    """When it ends."""
    devices: tuple[int, ...]
    """Those that it is summed over."""
    own: GradientSum
    """How long that takes."""


def last_sum_ms(parts: Iterable[Summed]) -> float:
    """Returns when the last bucket has been summed, in milliseconds; 0 where there is none."""
    ready = sorted(
        (part.start_ms + (part.end_ms - part.start_ms) * bucket / part.own.buckets, at, part)
        for at, part in enumerate(parts)
        if part.own.time_ms > 0
        for bucket in range(1, part.own.buckets + 1)
    )
    free: defaultdict[int, float] = defaultdict(float)
    for ready_ms, _, part in ready:
        start_ms = max(ready_ms, *(free[device] for device in part.devices))
        for device in part.devices:
            free[device] = start_ms + part.own.time_ms / part.own.buckets
    return max(free.values(), default=0.0)
