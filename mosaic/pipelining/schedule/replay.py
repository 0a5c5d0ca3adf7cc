"""Runs a schedule's rows with a clock each, to see that they come to their end and what memory they take meanwhile.

A channel is a pair of rows and a direction, forward or backward. Its messages arrive one after the other, each no
earlier than its time on the way after it was sent. To await either end of one needs both ends posted.
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
"""For each row its actions: a verb, or None for computing, and what it is about."""


def split(cell: str) -> tuple[str | None, str]:
    """Returns a cell's verb, None where it computes, and what it is about: a task, a message, or a chunk."""
    verb, parenthesis, inner = cell.partition("(")
    return (verb, inner[:-1]) if parenthesis else (None, cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A task graph by the texts of its tasks."""

    graph: TaskGraph
    """The tasks."""
    index: dict[str, int]
    """Of each task."""
    row: dict[str, int]
    """Of each task."""
    edges: dict[str, int]
    """For each edge, ``2F0>5F0``, its wait's index."""
    channels: dict[str, tuple[int, int, bool]]
    """For each edge between ranks the channel of its message: its rows, and whether it goes forward."""
    kept: dict[str, int]
    """Bytes that forwards keep."""
    handed: dict[str, int]
    """Bytes that a backward for inputs leaves to the one for weights, which frees them."""
    local: dict[str, list[str]]
    """For each task what it waits for on its own rank."""

    @classmethod
    def of(cls, graph: TaskGraph) -> Step:
        """Names the tasks of a graph."""
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
    """Returns when each task starts.

    Raises:
        InvalidScheduleError: Rows wait for each other for ever, or memory does not suffice; has the cell.
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
"""When, what comes first then, place in its row, number, bytes, and the cell."""


class _Run:
    """All rows under way."""

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
        """Lets each row do what it can, until none can do anything."""
        has_moved = True
        while has_moved:
            has_moved = False
            for row, actions in enumerate(self.rows):
                while self.at[row] < len(actions) and self._did(row, *actions[self.at[row]]):
                    self.at[row] += 1
                    has_moved = True

    def _did(self, row: int, verb: str | None, what: str) -> bool:
        """Does an action, or returns False if what it waits for has not happened."""
        if verb is None:
            return self._computed(row, what)
        if verb == "SEND":
            channel = self.step.channels[what]
            there = self.clock[row] + self.step.graph.waits[self.step.edges[what]].lag_ns
            self.arrival[what] = self.busy[channel] = max(self.busy[channel], there)
        elif verb == "RECV":
            self.posted.add(what)
        elif verb == "FREE":
            self._note(row, -self.step.kept[what], self.clock[row])
        elif verb in ("SENT", "GOT"):
            if what not in self.arrival or what not in self.posted:
                return False
            if verb == "GOT":
                self.clock[row] = max(self.clock[row], self.arrival[what])
        return True

    def _computed(self, row: int, name: str) -> bool:
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
        """Notes memory: at one instant ends come before starts, and what a row starts then comes in the row's order."""
        order = int(change > 0 or self.began[row] == at_ns)
        noted = self.memory[self.step.graph.rank_of[row]]
        noted.append((at_ns, order, self.at[row], len(noted), change, (row, self.at[row])))
