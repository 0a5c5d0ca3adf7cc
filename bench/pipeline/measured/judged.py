"""One way's steps on the ranks: how long each took, and what was simulated for it beforehand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.pipeline.measured.models import Microbatch
from mosaic.pipelining.layers import CountedMicrobatch
from mosaic.pipelining.plan import StepPlanner
from mosaic.pipelining.planner import SharedStep
from mosaic.pipelining.schedule import TaskName
from mosaic.pipelining.tasks import Timed, simulate
from mosaic.ranks.pipeline.setup import PipelineSetup
from mosaic.ranks.pipeline.step import PipelineRunner
from mosaic.ranks.pipeline.trial import gather_tasks


@dataclass(kw_only=True)
class JudgedStep:
    """One step by one way."""

    shared: SharedStep
    """Its schedule."""
    simulated_ms: float
    """From its first task's start to its last one's end, simulated before it ran."""
    peak_bytes: Sequence[int]
    """Of each rank, simulated."""
    step_ms: list[float] = field(default_factory=list)
    """Each time that it ran: from the call to the losses, on the slowest rank."""
    tasks_ms: list[float] = field(default_factory=list)
    """Of that from the first task's start to the last one's end, on all ranks."""


def judge(
    own: PipelineSetup, planner: StepPlanner, step: Sequence[Microbatch], *, seconds: float | None = None
) -> JudgedStep:
    """Plans a step on rank 0 for all, and simulates it."""
    counted = [own.counted.microbatch(one) for one in step]
    shared: SharedStep = own.world.broadcast(
        planner.plan_step(counted, seconds=seconds) if own.world.rank == 0 else None
    )
    timed = simulated(planner, counted, shared)
    return JudgedStep(shared=shared, simulated_ms=timed.makespan_ns / 1e6, peak_bytes=timed.peak_bytes)


def simulated(planner: StepPlanner, counted: Sequence[CountedMicrobatch], shared: SharedStep) -> Timed:
    """Plays a schedule of one replica with the way's times."""
    (schedule,) = shared.schedules
    assert schedule is not None
    graph = replace(planner.tasks(counted, schedule), limit_bytes=())
    at = {str(TaskName.of(task)): index for index, task in enumerate(graph.tasks)}
    timed = simulate(graph, tuple(tuple(at[cell] for cell in row if cell in at) for row in schedule.rows))
    assert isinstance(timed, Timed)
    return timed


def take(own: PipelineSetup, runner: PipelineRunner, judged: JudgedStep, step: Sequence[Microbatch]) -> list[float]:
    """Runs a step once, notes what it took, and drops its gradients; returns its losses."""
    own.world.all_gather("ready")
    began = time.perf_counter()
    ran = runner.run(judged.shared, step, shapes=own.shapes(step))
    judged.step_ms.append(slowest_ms(own, began))
    own.drop_gradients()
    tasks = gather_tasks(ran.spans, runner.grid.transport)
    judged.tasks_ms.append(max(tasks.start_ns[name] + tasks.time_ns[name] for name in tasks.time_ns) / 1e6)
    return ran.losses.tolist()


def slowest_ms(own: PipelineSetup, began: float) -> float:
    """Returns the time since ``began`` of the rank that has taken longest."""
    took = 1e3 * (time.perf_counter() - began)
    return max(float(text) for text in own.world.all_gather(json.dumps(took)))
