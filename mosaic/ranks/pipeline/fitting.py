"""What a step took, on all ranks, and what that says about counted times."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mosaic.pipelining.planner import PlannedStep
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.tasks import TaskGraph
from mosaic.ranks.pipeline.executing.executor import Executor
from mosaic.ranks.pipeline.executing.step_run import ActionTimes
from mosaic.schedule import ActionKind


@dataclass(kw_only=True)
class MeasuredTasks:
    """When the tasks of a step ran, on all ranks."""

    start_ns: dict[str, int] = field(default_factory=dict)
    """By name; the first starts at 0."""
    time_ns: dict[str, int] = field(default_factory=dict)
    """By name."""

    def of(self, graph: TaskGraph) -> tuple[TaskGraph, tuple[int, ...]]:
        """Returns a step's tasks with measured times, and their starts."""
        names = [str(TaskName.of(task)) for task in graph.tasks]
        tasks = tuple(replace(task, time_ns=self.time_ns[name]) for task, name in zip(graph.tasks, names, strict=True))
        return replace(graph, tasks=tasks), tuple(self.start_ns[name] for name in names)


def gather_tasks(times: ActionTimes, executor: Executor) -> MeasuredTasks:
    """Returns when tasks ran on all ranks; clocks of several machines are not brought together."""
    own = {
        cell: (start, end)
        for cell, start, end in zip(times.cells, times.start_ns, times.end_ns, strict=True)
        if cell[0].isdigit()
    }
    spans = {cell: span for text in executor.transport.tell(json.dumps(own)) for cell, span in json.loads(text).items()}
    origin = min(start for start, _ in spans.values())
    return MeasuredTasks(
        start_ns={cell: start - origin for cell, (start, _) in spans.items()},
        time_ns={cell: end - start for cell, (start, end) in spans.items()},
    )


@dataclass(frozen=True, kw_only=True)
class FittedTimes:
    """What a measured step says about counted times."""

    scales: Mapping[str, tuple[float, float]]
    """For each module measured over counted times of forward and backward; of all where it had no task of its own."""
    task_ns: int
    """What a forward takes beside its layers."""


def fit_times(
    planned: PlannedStep, measured: MeasuredTasks, modules: Sequence[str], *, whole_forwards_ns: int | None
) -> FittedTimes:
    """Fits measured times of tasks of one module each.

    Args:
        planned: The step, with counted times.
        measured: The same step.
        modules: Names of all.
        whole_forwards_ns: What its microbatches' forwards take uncut; what cut ones take more is shared by all tasks.
            None: nobody can run them uncut, and it is taken to be nothing.
    """
    forwards = [task for task in planned.graph.tasks if task.kind is ActionKind.FORWARD]
    cut_ns = sum(measured.time_ns[str(TaskName.of(task))] for task in forwards)
    task_ns = 0 if whole_forwards_ns is None else max(0, cut_ns - whole_forwards_ns) // max(1, len(forwards))
    sums: dict[tuple[str, bool], list[int]] = {}
    for task in planned.graph.tasks:
        is_forward = task.kind is ActionKind.FORWARD
        taken = max(0, measured.time_ns[str(TaskName.of(task))] - (task_ns if is_forward else 0))
        for name in ("", task.parts[0].module) if len(task.parts) == 1 else ("",):
            pair = sums.setdefault((name, is_forward), [0, 0])
            pair[0] += taken
            pair[1] += task.time_ns

    def scale(name: str, is_forward: bool) -> float:
        taken, counted = sums.get((name, is_forward)) or sums.get(("", is_forward)) or (1, 1)
        return taken / max(1, counted)

    return FittedTimes(scales={name: (scale(name, True), scale(name, False)) for name in modules}, task_ns=task_ns)
