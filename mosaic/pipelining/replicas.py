"""A step that replicas of a pipeline share: which microbatches each one runs, and in which schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mosaic.pipelining.partition.request import Request, layer_times
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.pipelining.workload.microbatch import Microbatch

Shares = tuple[tuple[int, ...], ...]
"""For each replica the indices of its microbatches in the step, in the step's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """One step on all replicas."""

    shares: Shares
    """Whose microbatches are whose."""
    schedules: tuple[PipelineSchedule | None, ...]
    """Each replica's, of its share; None where it has no microbatches."""


def share_out(times: Sequence[float], num_replicas: int) -> Shares:
    """Gives each item to the replica that has the least so far, the longest first (Graham's LPT rule).

    The longest is at most 4/3 of the shortest possible longest share (https://doi.org/10.1137/0117039). The first
    replica has an item if there is any; others may have none.
    """
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [0.0] * num_replicas
    for item in sorted(range(len(times)), key=lambda at: (-times[at], at)):
        least = min(range(num_replicas), key=lambda at: (loads[at], len(shares[at]), at))
        shares[least].append(item)
        loads[least] += times[item]
    return tuple(tuple(sorted(share)) for share in shares)


def shares_of(request: Request, step: Sequence[Microbatch], num_replicas: int) -> Shares:
    """Shares a step out by the times of its microbatches: of all phases of all layers."""
    if num_replicas == 1:
        return (tuple(range(len(step))),)
    known: dict[Microbatch, float] = {}
    for one in step:
        if one not in known:
            times = layer_times(replace(request, microbatches=(one,)))
            known[one] = math.fsum(time for layers in times.values() for time in layers)
    return share_out([known[one] for one in step], num_replicas)


def plan_shares(
    shares: Shares, step: Sequence[Microbatch], plan: Callable[[Sequence[Microbatch]], PipelineSchedule]
) -> SharedStep:
    """Plans the schedule of each share that is not empty."""
    schedules = (plan([step[at] for at in share]) if share else None for share in shares)
    return SharedStep(shares=shares, schedules=tuple(schedules))
