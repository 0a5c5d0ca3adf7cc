"""A step on replicas of a pipeline: the microbatches and the schedule of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mosaic.pipelining.partition.request import Request, layer_times
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.pipelining.workload.microbatch import Microbatch

Shares = tuple[tuple[int, ...], ...]
"""Indices of each replica's microbatches in the step, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """One step on all replicas."""

    shares: Shares
    schedules: tuple[PipelineSchedule | None, ...]
    """Schedule of each replica; None without microbatches."""


def share_out(times: Sequence[float], num_replicas: int) -> Shares:
    """Assigns each item to the replica with the least load, the longest first (Graham's LPT rule).

    The longest is at most 4/3 of the shortest possible longest share (https://doi.org/10.1137/0117039). The first
    replica has an item unless ``times`` is empty; others may have none.
    """
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [0.0] * num_replicas
    for item in sorted(range(len(times)), key=lambda at: (-times[at], at)):
        least = min(range(num_replicas), key=lambda at: (loads[at], len(shares[at]), at))
        shares[least].append(item)
        loads[least] += times[item]
    return tuple(tuple(sorted(share)) for share in shares)


def shares_of(request: Request, step: Sequence[Microbatch], num_replicas: int) -> Shares:
    """Divides a step by the times of its microbatches, over all phases of all layers."""
    if num_replicas == 1:
        return (tuple(range(len(step))),)
    known: dict[Microbatch, float] = {}
    for microbatch in step:
        if microbatch not in known:
            times = layer_times(replace(request, microbatches=(microbatch,)))
            known[microbatch] = math.fsum(time for layers in times.values() for time in layers)
    return share_out([known[microbatch] for microbatch in step], num_replicas)


def plan_shares(
    shares: Shares, step: Sequence[Microbatch], plan: Callable[[Sequence[Microbatch]], PipelineSchedule]
) -> SharedStep:
    """Plans the schedule of each share that is not empty."""
    schedules = (plan([step[at] for at in share]) if share else None for share in shares)
    return SharedStep(shares=shares, schedules=tuple(schedules))
