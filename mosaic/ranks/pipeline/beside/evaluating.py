"""Schedules of evaluation: forwards alone, which keep nothing, in the order in which a step would have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mosaic.pipelining.replicas import SharedStep
from mosaic.pipelining.schedule.forward_only import forward_only
from mosaic.pipelining.workload.microbatch import Microbatch
from mosaic.ranks.pipeline.ways import Way


def forwards_of(way: Way, step: Sequence[Microbatch]) -> SharedStep:
    """Plans the forwards of microbatches: at once, and whatever memory their backwards would take."""
    free = replace(way, space=replace(way.space, limit_bytes=0))
    shared = free.plan_shared(step, seconds=0.0)
    return replace(shared, schedules=tuple(None if one is None else forward_only(one) for one in shared.schedules))
