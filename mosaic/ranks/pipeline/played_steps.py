"""Steps that have run on this rank: measured beside simulated, and as a trace that shows a slow rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mosaic.pipelining.layers import AS_COUNTED, Microbatch
from mosaic.pipelining.plan import StepPlanner
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, Verb
from mosaic.pipelining.tasks import ActionKind, TaskGraph
from mosaic.rank_trace import RankSpan
from mosaic.ranks.pipeline.executor import Span
from mosaic.ranks.pipeline.transport import Transport
from mosaic.ranks.pipeline.trial import gather_spans

MAX_STEPS = 100
"""Steps that a trace has."""
ANY_LAYERS = "layers"
"""Stands for a module in traces whose planned times are fitted to measured ones: then all are alike."""
_WAITS = (f"{Verb.AWAIT_SENT}(", f"{Verb.AWAIT_RECEIVED}(")


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """One step twice: its tasks, and when each starts."""

    measured: tuple[TaskGraph, Sequence[int]]
    simulated: tuple[TaskGraph, Sequence[int]]
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

    @property
    def computing_ms(self) -> float:
        """Time of this rank's tasks."""
        return sum(end - start for cell, start, end in self.spans if cell[0].isdigit()) / 1e6

    @property
    def waiting_ms(self) -> float:
        """Time of its waits for messages."""
        return sum(end - start for cell, start, end in self.spans if cell.startswith(_WAITS)) / 1e6

    def played(self, planner: StepPlanner, transport: Transport) -> PlayedStep:
        """Returns the step as measured on the ranks of this one's replica and as simulated; all ranks call it."""
        spans = gather_spans(self.spans, transport)
        if self.schedule is None:
            raise ValueError("this rank's replica had no microbatches in the last step; ask another rank")
        graph, timed = planner.simulate(self.step, self.schedule)
        own = [spans[str(TaskName.of(task))] for task in graph.tasks]
        tasks = (replace(task, time_ns=end - start) for task, (start, end) in zip(graph.tasks, own, strict=True))
        first = min(start for start, _ in own)
        measured = replace(graph, tasks=tuple(tasks)), [start - first for start, _ in own]
        return PlayedStep(measured=measured, simulated=(graph, timed.start_ns))

    def computed(self, planner: StepPlanner) -> list[RankSpan]:
        """Returns the tasks of this rank with their planned times, on its own clock."""
        if self.schedule is None:
            return []
        is_fitted = any(fit != AS_COUNTED for fit in planner.plan.fitted.modules.values())
        tasks = {str(TaskName.of(task)): task for task in planner.tasks(self.step, self.schedule).tasks}
        return [
            RankSpan(
                kind="compute",
                module=ANY_LAYERS if is_fitted else "+".join(sorted({part.module for part in tasks[cell].parts})),
                phase="forward" if tasks[cell].kind is ActionKind.FORWARD else "backward",
                step=self.number,
                start_us=start / 1e3,
                end_us=end / 1e3,
                expected_ms=tasks[cell].time_ns / 1e6,
            )
            for cell, start, end in self.spans
            if cell[0].isdigit()
        ]
