"""What steps took, on all ranks, and what that says about counted times.

Tasks of one module each, with few and many layers, whole microbatches and pieces, give each module a line for each
phase: measured time over counted time, and what a layer takes whatever its data. Messages say what posting and sending
them takes beside the network's description. Times are those of the host: on a GPU those of launches, which say little.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from mosaic.graph import Part
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.fitted_times import FittedTimes, HostTimes
from mosaic.pipelining.partition.partition import Chunk, Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.tasks import Task, TaskGraph
from mosaic.pipelining.workload.phase_fit import ModuleFit, PhaseFit
from mosaic.ranks.pipeline.executing.executor import Executor
from mosaic.ranks.pipeline.executing.step_run import ActionTimes
from mosaic.ranks.pipeline.trying.least_squares import fit_above_zero

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


@dataclass(frozen=True, kw_only=True)
class FitStep:
    """A step that was run to be fitted to."""

    graph: TaskGraph
    """Its tasks, with counted times."""
    measured: Sequence[MeasuredTasks]
    """The same step each time that it ran."""
    is_apart: bool
    """Whether backward for weights is a task of its own."""


def partition_to_fit(request: Request, sizes: Mapping[str, int], *, is_fine: bool) -> Partition:
    """Returns modules that pass over the ranks once, a chunk on each.

    Args:
        request: Model and ranks.
        sizes: Of pieces.
        is_fine: Whether chunks are cut further, so that tasks have the first layer, the last, one, or several.
    """
    ranks, chunks = request.num_ranks, []
    for module in request.model.modules:
        count = len(module.trains)
        bounds = [rank * count // ranks for rank in range(ranks + 1)]
        cuts = sorted({*bounds, *(at for at in (1, 2, count - 1) if is_fine and 0 < at < count)})
        for first, end in pairwise(cuts):
            rank = max(rank for rank in range(ranks) if bounds[rank] <= first)
            part = Part(module=module.name, first=first, count=end - first, total=count)
            chunks.append(Chunk(parts=(part,), rank=rank))
    return Partition(num_ranks=ranks, chunks=tuple(chunks), sizes=sizes)


def fit_times(steps: Iterable[FitStep], names: Sequence[str]) -> FittedTimes:
    """Fits what tasks of one module each took.

    Args:
        steps: That ran, each with tasks of all phases.
        names: Of all modules; one without tasks has the fit of all tasks together.
    """
    samples: defaultdict[tuple[ActionKind, bool], list[_Sample]] = defaultdict(list)
    steps = list(steps)
    for step in steps:
        for task in step.graph.tasks:
            name = str(TaskName.of(task))
            taken = min(one.time_ns[name] for one in step.measured)  # what disturbs a task makes it longer
            samples[task.kind, step.is_apart].append(_Sample.of(task, taken / 1e6))
    forward, task_ms = _fitted(samples[ActionKind.FORWARD, False], names, with_task=True)
    whole = _both(_fitted(samples[ActionKind.BACKWARD, False], names)[0])
    modules = {name: ModuleFit(forward=forward[name], backward=whole[name], weights=whole[name]) for name in names}
    apart = {}
    if samples[ActionKind.FORWARD, True]:
        alone = [sample.without(task_ms) for sample in samples[ActionKind.FORWARD, True]]
        phases = [
            _fitted(found, names)[0]
            for found in (alone, samples[ActionKind.BACKWARD, True], samples[ActionKind.WEIGHTS, True])
        ]
        apart = {
            name: ModuleFit(forward=phases[0][name], backward=phases[1][name], weights=phases[2][name])
            for name in names
        }
    return FittedTimes(modules=modules, apart=apart, host=_host_times(steps, task_ms))


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

    def without(self, ms: float) -> _Sample:
        return replace(self, taken_ms=max(0.0, self.taken_ms - ms))

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
    found = fit_above_zero(rows, [one.taken_ms for one in own])
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
