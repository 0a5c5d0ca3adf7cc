"""Steps that have run on this rank: measured beside simulated, and as a trace by which a slow rank is found."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from mosaic.pipelining.layers import Microbatch
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.pipelining.tasks import ActionKind, TaskGraph, Timed, simulate
from mosaic.rank_trace import RankSpan
from mosaic.ranks.pipeline.executing.executor import ActionTimes, Executor
from mosaic.ranks.pipeline.runner import StepPlanner
from mosaic.ranks.pipeline.trying.fitting import gather_tasks

MAX_STEPS = 100
"""Steps that a trace has."""
ANY_LAYERS = "layers"
"""Stands for a module in traces whose planned times are fitted to measured ones: then all are alike."""
_WAITS = ("SENT(", "GOT(")


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """One step twice: its tasks, and when each starts."""

    measured: tuple[TaskGraph, tuple[int, ...]]
    """With the times that tasks took."""
    simulated: tuple[TaskGraph, tuple[int, ...]]
    """The same order with counted times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStep:
    """One step on this rank."""

    number: int
    """Steps that had ended before."""
    step: tuple[Microbatch, ...]
    """What its replica ran."""
    schedule: PipelineSchedule | None
    """Of its replica; None: it had no microbatches."""
    times: ActionTimes
    """Of this rank's actions."""

    @property
    def computing_ms(self) -> float:
        """How long this rank computed."""
        return sum(end - start for cell, start, end in self._spans if cell[0].isdigit()) / 1e6

    @property
    def waiting_ms(self) -> float:
        """How long it waited for messages."""
        return sum(end - start for cell, start, end in self._spans if cell.startswith(_WAITS)) / 1e6

    @property
    def _spans(self) -> zip[tuple[str, int, int]]:
        return zip(self.times.cells, self.times.start_ns, self.times.end_ns, strict=True)

    def computed(self, planner: StepPlanner) -> list[RankSpan]:
        """Returns what this rank computed, with the times that the plan has, on its own clock."""
        if self.schedule is None:
            return []
        graph = planner.tasks(self.step, self.schedule)
        expected = {str(TaskName.of(task)): task.time_ns / 1e6 for task in graph.tasks}
        modules = {str(TaskName.of(task)): "+".join(sorted({p.module for p in task.parts})) for task in graph.tasks}
        return [
            RankSpan(
                kind="compute",
                module=ANY_LAYERS if planner.is_fitted else modules[cell],
                phase="forward" if TaskName.parse(cell).kind is ActionKind.FORWARD else "backward",
                step=self.number,
                start_us=start / 1e3,
                end_us=end / 1e3,
                expected_ms=expected[cell],
            )
            for cell, start, end in self._spans
            if cell[0].isdigit()
        ]


class PlayedSteps:
    """The last steps of this rank.

    Args:
        way: How they run.
        executor: Of the rank's replica.
    """

    def __init__(self, planner: StepPlanner, executor: Executor) -> None:
        self._planner, self._executor = planner, executor
        self._steps: deque[OwnStep] = deque(maxlen=MAX_STEPS)

    def note(self, step: OwnStep) -> None:
        """Adds one."""
        self._steps.append(step)

    @property
    def last(self) -> OwnStep | None:
        """The last one."""
        return self._steps[-1] if self._steps else None

    def timeline(self) -> PlayedStep:
        """Returns the last step, as measured on the ranks of this one's replica and as simulated; all of them ask.

        Raises:
            ValueError: No step has run, or this rank's replica had no microbatches.
        """
        last = self.last
        if last is None:
            raise ValueError("no step has run; call timeline() after step()")
        if last.schedule is None:
            raise ValueError("this rank's replica had no microbatches in the last step; ask another rank")
        measured = gather_tasks(last.times, self._executor)
        graph = self._planner.tasks(last.step, last.schedule)
        return PlayedStep(measured=measured.of(graph), simulated=(graph, _starts(graph, last.schedule)))

    def computed(self) -> list[RankSpan]:
        """Returns what this rank computed in the last steps, on its own clock."""
        return [span for step in self._steps for span in step.computed(self._planner)]


def _starts(graph: TaskGraph, schedule: PipelineSchedule) -> tuple[int, ...]:
    """Simulates a schedule's orders."""
    index = {str(TaskName.of(task)): at for at, task in enumerate(graph.tasks)}
    orders = tuple(tuple(index[cell] for cell in row if cell in index) for row in schedule.rows)
    timed = simulate(replace(graph, limit_bytes=()), orders)
    assert isinstance(timed, Timed)
    return tuple(timed.start_ns)
