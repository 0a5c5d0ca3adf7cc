"""A step on lanes that is run to see how long modules take on shares of a rank, beside each other.

One step gives each module one number: the power of its share that its tasks' times grow with. What disturbs it beside,
such as memory that lanes share, is in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mosaic.pipelining.fitted_times import FittedTimes
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.replicas import SharedStep
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.tasks import TaskGraph
from mosaic.ranks.pipeline.trying.candidates import Candidates
from mosaic.ranks.pipeline.trying.fit_candidates import FIT_STEPS, WARM_STEPS
from mosaic.ranks.pipeline.trying.fitting import MeasuredTasks, gather_tasks
from mosaic.ranks.pipeline.ways import Way

MAX_EXPONENT = 2.0
"""Of a share: a module on half of a rank takes four times as long at most."""


def fit_lanes(own: Candidates, way: Way, step: Sequence[Mapping[str, Any]]) -> Candidates:
    """Runs a step of a way that has lanes; returns what is planned with how long modules took on them.

    Args:
        own: With fitted times of modules that have their ranks to themselves.
        way: With lanes, planned with speeds in proportion to shares.
        step: The sample's.
    """
    shared = own.plan_sample(way)
    if not isinstance(shared, SharedStep) or shared.schedules[0] is None:
        return own
    graph = way.tasks([way.request.microbatches[at] for at in shared.shares[0]], shared.schedules[0])
    runner, shapes = own.runner(way, keeps_all=True), own.shapes(step)
    measured = []
    for at in range(WARM_STEPS + FIT_STEPS):
        with runner.parted.lent_memory():
            ran = runner.run(shared, step, shapes=shapes)
            own.drop_gradients()
        if at >= WARM_STEPS:
            measured.append(gather_tasks(ran.times, runner.grid.executor))
    fitted = FittedTimes.of(own.request.model.modules, own.space.host)
    if own.world.rank == 0:
        fitted = replace(fitted, share_exponents=share_exponents(graph, way.partition, measured))
    return own.with_times(own.world.broadcast(fitted))


def share_exponents(graph: TaskGraph, partition: Partition, measured: Sequence[MeasuredTasks]) -> dict[str, float]:
    """Returns for each module with a lane of its own the power of its share that its times grow with.

    Args:
        graph: A step's tasks, with times in proportion to shares.
        partition: Its chunks on lanes.
        measured: What they took, each time that the step ran.
    """
    whole: defaultdict[str, float] = defaultdict(float)
    taken: defaultdict[str, float] = defaultdict(float)
    share_of: dict[str, float] = {}
    for task in graph.tasks:
        chunk = partition.chunks[task.chunk]
        module, *others = dict.fromkeys(part.module for part in chunk.parts)
        if others or chunk.share == 1:
            continue
        name = str(TaskName.of(task))
        whole[module] += task.time_ns * chunk.share
        taken[module] += min(one.time_ns[name] for one in measured)
        share_of[module] = chunk.share
    found = {
        module: math.log(taken[module] / whole[module]) / -math.log(share)
        for module, share in share_of.items()
        if whole[module] > 0 and taken[module] > 0
    }
    return {module: min(max(exponent, 0.0), MAX_EXPONENT) for module, exponent in found.items()}
