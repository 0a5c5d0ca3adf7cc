"""Fits counted times to steps that were run: modules cut apart, in few and many layers, and on lanes.

Tasks of one module each, with few and many layers, whole microbatches and pieces, give each module a line for each
phase: measured time over counted time, and the constant time of a layer. Messages give the time to post and to send
them beside the network's description. Times are those of the host: on a GPU those of launches, which say little.

A step on lanes gives each module one number: the power of its share that its tasks' times grow with. Disturbance by
neighbours, such as through shared memory, is part of it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from mosaic.graph import Part
from mosaic.pipelining.layers import ModuleFit, PhaseFit
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.partition import Chunk, Partition, Request
from mosaic.pipelining.plan import FittedTimes
from mosaic.pipelining.planner import SharedStep
from mosaic.pipelining.schedule import TaskName
from mosaic.pipelining.task_graph import HostTimes
from mosaic.pipelining.tasks import ActionKind, Task, TaskGraph
from mosaic.ranks.pipeline.executing.executor import ActionTimes, Executor
from mosaic.ranks.pipeline.runner import PipelineRunner, StepPlanner
from mosaic.ranks.pipeline.trying.setup import PipelineSetup

WARM_STEPS = 1
"""Steps before the measured ones."""
FIT_STEPS = 2
"""Measured steps."""
MAX_EXPONENT = 2.0
"""Largest power of a share: a module on half of a rank takes at most four times as long."""
WAITED_NS = 100_000
"""A receiver that waited so long was there before its message, whose way is then known."""

Spans = Mapping[str, tuple[int, int]]
"""For each action its start and end."""


@dataclass(kw_only=True)
class MeasuredTasks:
    """When the actions of a step ran, on all ranks of a pipeline."""

    start_ns: dict[str, int] = field(default_factory=dict)
    """Of each task by name; the first starts at 0."""
    time_ns: dict[str, int] = field(default_factory=dict)
    """Of each task by name."""
    spans: Spans = field(default_factory=dict)
    """Of all actions, on the clock of their machine."""

    def of(self, graph: TaskGraph) -> tuple[TaskGraph, tuple[int, ...]]:
        """Returns a step's tasks with measured times, and their starts."""
        names = [str(TaskName.of(task)) for task in graph.tasks]
        tasks = tuple(replace(task, time_ns=self.time_ns[name]) for task, name in zip(graph.tasks, names, strict=True))
        return replace(graph, tasks=tasks), tuple(self.start_ns[name] for name in names)


def gather_tasks(times: ActionTimes, executor: Executor) -> MeasuredTasks:
    """Returns when actions ran on all ranks; clocks of several machines are not brought together."""
    own = {cell: (start, end) for cell, start, end in zip(times.cells, times.start_ns, times.end_ns, strict=True)}
    told = [json.loads(text) for text in executor.transport.tell(json.dumps(own))]
    spans = {cell: (start, end) for each in told for cell, (start, end) in each.items()}
    tasks = {cell: span for cell, span in spans.items() if cell[0].isdigit()}
    origin = min(start for start, _ in tasks.values())
    return MeasuredTasks(
        start_ns={cell: start - origin for cell, (start, _) in tasks.items()},
        time_ns={cell: end - start for cell, (start, end) in tasks.items()},
        spans=spans,
    )


def fit_modules(own: PipelineSetup, step: Sequence[Mapping[str, Any]]) -> PipelineSetup:
    """Runs modules cut apart, so that each task is one module's; returns the candidates with measured times.

    Where that does not fit in memory, or there are fewer layers than ranks, times stay as they were counted.
    """
    units = {
        module.name: max(module.units(one) for one in own.request.microbatches) for module in own.request.model.modules
    }
    halves = {name: -(-most // 2) for name, most in units.items() if most > 1}
    planned = [_planned_apart(own, sizes) for sizes in ({}, halves)[: 1 + bool(halves)]]
    runs = [run for run in planned if run is not None]
    if not runs:
        return own
    steps = _measured(own, runs, step)
    names = [module.name for module in own.request.model.modules]
    return own.with_times(own.world.broadcast(fit_times(steps, names) if own.world.rank == 0 else None))


def fit_lanes(own: PipelineSetup, planner: StepPlanner, step: Sequence[Mapping[str, Any]]) -> PipelineSetup:
    """Runs a step of a plan with lanes; returns the candidates with the speeds of modules on them.

    Args:
        own: With fitted times of modules that have their ranks to themselves.
        way: A plan with lanes, made with speeds in proportion to shares.
        step: The sample's.
    """
    shared = own.plan_sample(planner)
    if not isinstance(shared, SharedStep) or shared.schedules[0] is None:
        return own
    (fit_step,) = _measured(own, [_fit_run(own, planner, shared)], step)
    fitted = FittedTimes.of(own.request.model.modules, own.space.host)
    if own.world.rank == 0:
        exponents = share_exponents(fit_step.graph, planner.partition, fit_step.measured)
        fitted = replace(fitted, share_exponents=exponents)
    return own.with_times(own.world.broadcast(fitted))


_Run = tuple[TaskGraph, SharedStep, PipelineRunner]
"""Tasks of the first replica, whose times count, since rank 0 fits; the step, and its runner."""


def _planned_apart(own: PipelineSetup, sizes: Mapping[str, int]) -> _Run | None:
    """Plans the step with modules cut apart; None if it cannot run."""
    partition = partition_to_fit(own.request, sizes)
    if {chunk.rank for chunk in partition.chunks} != set(range(partition.num_ranks)):
        return None
    options = replace(own.options, weights="with", limits=OrderLimits(effort=0.0))
    planner = replace(own, options=options).given(partition)
    shared = own.plan_sample(planner, seconds=0.0)
    return None if isinstance(shared, str) else _fit_run(own, planner, shared)


def _fit_run(own: PipelineSetup, planner: StepPlanner, shared: SharedStep) -> _Run:
    schedule = shared.schedules[0]
    assert schedule is not None
    graph = planner.tasks([planner.request.microbatches[at] for at in shared.shares[0]], schedule)
    return graph, shared, own.runner(planner, keeps_all=True)


def _measured(own: PipelineSetup, runs: Sequence[_Run], step: Sequence[Mapping[str, Any]]) -> list[FitStep]:
    """Runs steps in turn, so that a drift hits all."""
    shapes = own.shapes(step)
    measured: list[list[MeasuredTasks]] = [[] for _ in runs]
    for at in range(WARM_STEPS + FIT_STEPS):
        for (_, shared, runner), tasks in zip(runs, measured, strict=True):
            with runner.parted.lent_memory():
                ran = runner.run(shared, step, shapes=shapes)
                own.drop_gradients()
            if at >= WARM_STEPS:
                tasks.append(gather_tasks(ran.times, runner.grid.executor))
    return [FitStep(graph=graph, measured=tasks) for (graph, _, _), tasks in zip(runs, measured, strict=True)]


@dataclass(frozen=True, kw_only=True)
class FitStep:
    """A step that was run to be fitted to."""

    graph: TaskGraph
    """Its tasks, with counted times."""
    measured: Sequence[MeasuredTasks]
    """The same step each time that it ran."""


def partition_to_fit(request: Request, sizes: Mapping[str, int]) -> Partition:
    """Returns modules that pass over the ranks once, in chunks of the first layer, the last, one, and several.

    Args:
        request: Model and ranks.
        sizes: Units of pieces.
    """
    ranks, chunks = request.num_ranks, []
    for module in request.model.modules:
        count = len(module.trains)
        bounds = [rank * count // ranks for rank in range(ranks + 1)]
        cuts = sorted({*bounds, *(at for at in (1, 2, count - 1) if 0 < at < count)})
        for first, end in pairwise(cuts):
            rank = max(rank for rank in range(ranks) if bounds[rank] <= first)
            part = Part(module=module.name, first=first, count=end - first, total=count)
            chunks.append(Chunk(parts=(part,), rank=rank))
    return Partition(num_ranks=ranks, chunks=tuple(chunks), sizes=sizes)


def fit_times(steps: Iterable[FitStep], names: Sequence[str]) -> FittedTimes:
    """Fits the measured times of tasks of one module each.

    Args:
        steps: Steps that ran, each with tasks of all phases.
        names: All modules; one without tasks has the fit of all tasks together.
    """
    samples: defaultdict[ActionKind, list[_Sample]] = defaultdict(list)
    steps = list(steps)
    for step in steps:
        for task in step.graph.tasks:
            taken = min(one.time_ns[str(TaskName.of(task))] for one in step.measured)  # disturbance adds time
            samples[task.kind].append(_Sample.of(task, taken / 1e6))
    forward, task_ms = _fitted(samples[ActionKind.FORWARD], names, with_task=True)
    backward = _both(_fitted(samples[ActionKind.BACKWARD], names)[0])
    modules = {
        name: ModuleFit(forward=forward[name], backward=backward[name], weights=backward[name]) for name in names
    }
    return FittedTimes(modules=modules, host=_host_times(steps, task_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A task of one module."""

    module: str
    counted_ms: float
    layers: int
    is_first: bool
    is_last: bool
    taken_ms: float

    @classmethod
    def of(cls, task: Task, taken_ms: float) -> _Sample:
        part = task.parts[0]
        return cls(
            module=part.module if len(task.parts) == 1 else "",
            counted_ms=task.time_ns / 1e6,
            layers=sum(part.count for part in task.parts),
            is_first=part.first == 0,
            is_last=task.parts[-1].end == task.parts[-1].total,
            taken_ms=taken_ms,
        )

    def row(self, names: Sequence[str], *, with_task: bool) -> list[float]:
        """Its equation: what grows with data comes first, and explains what others could, too."""
        own = [float(name == self.module) for name in names]
        columns = (self.counted_ms, float(self.layers), float(self.is_first), float(self.is_last))
        return [here * value for value in columns for here in own] + [1.0] * with_task


def _fitted(
    samples: Sequence[_Sample], names: Sequence[str], *, with_task: bool = False
) -> tuple[dict[str, PhaseFit], float]:
    """Returns each module's line, and what each task takes beside."""
    own = [sample for sample in samples if sample.module and sample.taken_ms > 0]
    counted = sum(sample.counted_ms for sample in samples)
    common = PhaseFit(scale=sum(sample.taken_ms for sample in samples) / counted if counted else 1.0)
    fits, seen = dict.fromkeys(names, common), [name for name in names if any(one.module == name for one in own)]
    if not seen:
        return fits, 0.0
    rows = [one.row(seen, with_task=with_task) for one in own]
    found = fit_above_zero(np.array(rows), np.array([one.taken_ms for one in own]))
    for at, name in enumerate(seen):
        scale, layer_ms, first_ms, last_ms = found[at : 4 * len(seen) : len(seen)]
        fits[name] = PhaseFit(scale=scale, layer_ms=layer_ms, first_ms=first_ms, last_ms=last_ms)
    return fits, found[-1] if with_task else 0.0


def _both(fits: Mapping[str, PhaseFit]) -> dict[str, PhaseFit]:
    """Halves what does not grow with data, for each of the two kinds of backward that one task runs."""
    return {
        name: replace(fit, layer_ms=fit.layer_ms / 2, first_ms=fit.first_ms / 2, last_ms=fit.last_ms / 2)
        for name, fit in fits.items()
    }


def _host_times(steps: Sequence[FitStep], task_ms: float) -> HostTimes:
    """Returns medians over messages; of their ways the mean of both directions, as clocks of machines differ."""
    posts: list[int] = []
    ways: defaultdict[str, list[int]] = defaultdict(list)
    for step in steps:
        names = [str(TaskName.of(task)) for task in step.graph.tasks]
        lags = {f"{names[wait.source]}>{names[wait.target]}": wait.lag_ns for wait in step.graph.waits}
        for spans in (one.spans for one in step.measured):
            for edge in (cell[5:-1] for cell in spans if cell.startswith("SEND(")):
                at = {verb: spans[f"{verb}({edge})"] for verb in ("SEND", "SENT", "RECV", "GOT")}
                posts.append(sum(at[verb][1] - at[verb][0] for verb in ("SEND", "SENT", "RECV")))
                if at["GOT"][1] - at["GOT"][0] > WAITED_NS:
                    kind = TaskName.parse(edge.partition(">")[0]).kind
                    ways[kind].append(at["GOT"][1] - at["SEND"][1] - lags.get(edge, 0))
    middle = [statistics.median(found) for found in ways.values()]
    return HostTimes(
        task_ns=round(1e6 * task_ms),
        post_ns=round(statistics.median(posts) / 2) if posts else 0,
        message_ns=max(0, round(statistics.fmean(middle))) if middle else 0,
    )


def fit_above_zero(rows: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> list[float]:
    """Returns coefficients of 0 or more for which the rows' sums come near values above 0.

    An error counts in proportion to the root of its value, as spreads of measured times grow. Columns have one norm: of
    equal ones the first is used.
    """
    from scipy.optimize import nnls  # half a second to import

    weighted = rows / np.sqrt(values)[:, None]
    norms = np.linalg.norm(weighted, axis=0)
    norms[norms == 0] = 1.0
    coefficients, _ = nnls(weighted / norms, np.sqrt(values))
    return [float(each) for each in coefficients / norms]


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
