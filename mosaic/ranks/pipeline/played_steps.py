"""Steps that have run on this rank: measured beside simulated, and as a trace that shows a slow rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mosaic.pipelining.layers import AS_COUNTED, Microbatch
from mosaic.pipelining.plan import StepPlanner
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, Verb
from mosaic.pipelining.tasks import ActionKind, TaskGraph, Timed, simulate
from mosaic.rank_trace import RankSpan
from mosaic.ranks.pipeline.executor import Span
from mosaic.ranks.pipeline.transport import Transport
from mosaic.ranks.pipeline.trial import gather_tasks

MAX_STEPS = 100
"""Steps that a trace has."""
ANY_LAYERS = "layers"
"""Stands for a module in traces whose planned times are fitted to measured ones: then all are alike."""
_WAITS = (f"{Verb.AWAIT_SENT}(", f"{Verb.AWAIT_RECEIVED}(")


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
    """The microbatches of its replica."""
    schedule: PipelineSchedule | None
    """Of its replica; None: it had no microbatches."""
    spans: Sequence[Span]
    """Times of this rank's actions."""

    @property
    def computing_ms(self) -> float:
        """Time of this rank's tasks."""
        return sum(end - start for cell, start, end in self.spans if cell[0].isdigit()) / 1e6

    @property
    def waiting_ms(self) -> float:
        """Time of its waits for messages."""
        return sum(end - start for cell, start, end in self.spans if cell.startswith(_WAITS)) / 1e6

    def computed(self, planner: StepPlanner) -> list[RankSpan]:
        """Returns the tasks of this rank with their planned times, on its own clock."""
        if self.schedule is None:
            return []
        graph = planner.tasks(self.step, self.schedule)
        is_fitted = any(fit != AS_COUNTED for fit in planner.plan.fitted.modules.values())
        expected = {str(TaskName.of(task)): task.time_ns / 1e6 for task in graph.tasks}
        modules = {str(TaskName.of(task)): "+".join(sorted({p.module for p in task.parts})) for task in graph.tasks}
        return [
            RankSpan(
                kind="compute",
                module=ANY_LAYERS if is_fitted else modules[cell],
                phase="forward" if TaskName.parse(cell).kind is ActionKind.FORWARD else "backward",
                step=self.number,
                start_us=start / 1e3,
                end_us=end / 1e3,
                expected_ms=expected[cell],
            )
            for cell, start, end in self.spans
            if cell[0].isdigit()
        ]


class PlayedSteps:
    """The last steps of this rank."""

    def __init__(self, planner: StepPlanner, transport: Transport) -> None:
        self._planner, self._transport = planner, transport
        self.steps: deque[OwnStep] = deque(maxlen=MAX_STEPS)

    def timeline(self) -> PlayedStep:
        """Returns the last step, as measured on the ranks of this one's replica and as simulated; all ranks call it.

        Raises:
            ValueError: No step has run, or this rank's replica had no microbatches.
        """
        if not self.steps:
            raise ValueError("no step has run; call timeline() after step()")
        last = self.steps[-1]
        measured = gather_tasks(last.spans, self._transport)
        if last.schedule is None:
            raise ValueError("this rank's replica had no microbatches in the last step; ask another rank")
        graph = self._planner.tasks(last.step, last.schedule)
        return PlayedStep(measured=measured.of(graph), simulated=(graph, _starts(graph, last.schedule)))

    def computed(self) -> list[RankSpan]:
        """Returns the tasks of this rank in the last steps, on its own clock."""
        return [span for step in self.steps for span in step.computed(self._planner)]


def _starts(graph: TaskGraph, schedule: PipelineSchedule) -> tuple[int, ...]:
    """Simulates a schedule's orders."""
    index = {str(TaskName.of(task)): at for at, task in enumerate(graph.tasks)}
    orders = tuple(tuple(index[cell] for cell in row if cell in index) for row in schedule.rows)
    timed = simulate(replace(graph, limit_bytes=()), orders)
    assert isinstance(timed, Timed)
    return tuple(timed.start_ns)
