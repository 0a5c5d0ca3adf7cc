"""Replay of a schedule with a clock for each row, which checks for deadlocks and memory.

A channel is a pair of rows and a direction, forward or backward. Its messages arrive one after the other, each at least
its lag after its send. Waiting for either end of a message needs both ends posted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.schedule import PipelineSchedule, wrong_cell
from mosaic.pipelining.tasks import TaskGraph, Timed

Rows = Sequence[Sequence[tuple[str | None, str]]]
"""Actions of each row: a verb, or None for computation, and its object."""


def split(cell: str) -> tuple[str | None, str]:
    """Returns a cell's verb, None for computation, and its object: a task, a message, or a chunk."""
    verb, parenthesis, inner = cell.partition("(")
    return (verb, inner[:-1]) if parenthesis else (None, cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A task graph by the texts of its tasks."""

    graph: TaskGraph
    """The tasks."""
    index: dict[str, int]
    """Index of each task."""
    row: dict[str, int]
    """Row of each task."""
    edges: dict[str, int]
    """Index of the wait of each edge, ``2F0>5F0``."""
    channels: dict[str, tuple[int, int, bool]]
    """Channel of each edge between ranks: its rows, and True for the forward direction."""
    kept: dict[str, int]
    """Bytes that forwards keep."""
    handed: dict[str, int]
    """Bytes that a backward for inputs leaves for the backward for weights to free."""
    local: dict[str, list[str]]
    """Inputs of each task on its own rank."""

    @classmethod
    def of(cls, graph: TaskGraph) -> Step:
        """Makes the step of a graph."""
        names = [str(TaskName.of(task)) for task in graph.tasks]
        left = {
            name: task.takes_bytes - task.frees_bytes
            for name, task in zip(names, graph.tasks, strict=True)
            if task.takes_bytes > task.frees_bytes
        }
        forwards = {name for name, task in zip(names, graph.tasks, strict=True) if task.kind is ActionKind.FORWARD}
        edges = {f"{names[wait.source]}>{names[wait.target]}": at for at, wait in enumerate(graph.waits)}
        local: dict[str, list[str]] = defaultdict(list)
        channels = {}
        for edge, wait in zip(edges, graph.waits, strict=True):
            source, target = graph.tasks[wait.source], graph.tasks[wait.target]
            if graph.rank_of[source.row] == graph.rank_of[target.row]:
                local[names[wait.target]].append(names[wait.source])
            else:
                channels[edge] = source.row, target.row, source.kind is ActionKind.FORWARD
        return cls(
            graph=graph,
            index={name: at for at, name in enumerate(names)},
            row={name: task.row for name, task in zip(names, graph.tasks, strict=True)},
            edges=edges,
            channels=channels,
            kept={name: size for name, size in left.items() if name in forwards},
            handed={name.replace("B", "W"): size for name, size in left.items() if name not in forwards},
            local=local,
        )


def replay(schedule: PipelineSchedule, step: Step, rows: Rows) -> Timed:
    """Returns the times of tasks.

    Raises:
        InvalidScheduleError: Rows deadlock, or memory does not suffice; has the cell.
    """
    run = _Run(step, rows)
    run.go()
    stuck = next((row for row, actions in enumerate(rows) if run.at[row] < len(actions)), None)
    if stuck is not None:
        others = [row for row, actions in enumerate(rows) if run.at[row] < len(actions) and row != stuck]
        standing = ", ".join(f"row {row} stands at {schedule.rows[row][run.at[row]]}" for row in others[:3])
        problem = f"it waits for ever; {standing or 'no other row waits'}: change an order"
        raise wrong_cell(schedule, stuck, run.at[stuck], problem)
    peaks = []
    for rank in range(step.graph.num_ranks):
        limit = step.graph.limit_bytes[rank] if step.graph.limit_bytes else 0
        most = used = step.graph.base_bytes[rank] if step.graph.base_bytes else 0
        for at_ns, _, _, _, change, place in sorted(run.memory[rank]):
            used += change
            most = max(most, used)
            if limit and used > limit:
                problem = (
                    f"at {at_ns / 1e6:.3f} ms its rank has {used} bytes in use, {used - limit} more than it has; free "
                    "earlier, keep less, or have fewer microbatches under way"
                )
                raise wrong_cell(schedule, *place, problem)
        peaks.append(most)
    return Timed(
        start_ns=[run.start[name] for name in step.index],
        makespan_ns=max(run.end.values(), default=0),
        peak_bytes=tuple(peaks),
    )


_Change = tuple[int, int, int, int, int, tuple[int, int]]
"""Time, order at that time, place in the row, number, bytes, and the cell."""


class _Run:
    """State of all rows."""

    def __init__(self, step: Step, rows: Rows) -> None:
        self.step, self.rows = step, rows
        self.at = [0] * len(rows)
        self.clock = [0] * len(rows)
        self.start: dict[str, int] = {}
        self.end: dict[str, int] = {}
        self.arrival: dict[str, int] = {}
        self.posted: set[str] = set()
        self.busy: dict[tuple[int, int, bool], int] = defaultdict(int)
        self.began = [-1] * len(rows)
        self.memory: list[list[_Change]] = [[] for _ in range(step.graph.num_ranks)]

    def go(self) -> None:
        """Advances the rows until none can move."""
        has_moved = True
        while has_moved:
            has_moved = False
            for row, actions in enumerate(self.rows):
                while self.at[row] < len(actions) and self._advance(row, *actions[self.at[row]]):
                    self.at[row] += 1
                    has_moved = True

    def _advance(self, row: int, verb: str | None, subject: str) -> bool:
        """Runs an action, or returns False if it has to wait."""
        if verb is None:
            return self._compute(row, subject)
        if verb == "SEND":
            channel = self.step.channels[subject]
            there = self.clock[row] + self.step.graph.waits[self.step.edges[subject]].lag_ns
            self.arrival[subject] = self.busy[channel] = max(self.busy[channel], there)
        elif verb == "RECV":
            self.posted.add(subject)
        elif verb == "FREE":
            self._note(row, -self.step.kept[subject], self.clock[row])
        elif verb in ("SENT", "GOT"):
            if subject not in self.arrival or subject not in self.posted:
                return False
            if verb == "GOT":
                self.clock[row] = max(self.clock[row], self.arrival[subject])
        return True

    def _compute(self, row: int, name: str) -> bool:
        inputs = self.step.local.get(name, ())
        if any(source not in self.end for source in inputs):
            return False
        task = self.step.graph.tasks[self.step.index[name]]
        self.start[name] = max([self.clock[row], *(self.end[source] for source in inputs)])
        self.end[name] = self.clock[row] = self.start[name] + task.time_ns
        self.began[row] = self.start[name]
        self._note(row, task.takes_bytes, self.start[name])
        temporary = min(task.frees_bytes, task.takes_bytes)
        self._note(row, -temporary - self.step.handed.get(name, 0), self.end[name])
        return True

    def _note(self, row: int, change: int, at_ns: int) -> None:
        """Records a change of memory: at one instant ends come before starts, and starts in the row's order."""
        order = int(change > 0 or self.began[row] == at_ns)
        changes = self.memory[self.step.graph.rank_of[row]]
        changes.append((at_ns, order, self.at[row], len(changes), change, (row, self.at[row])))
