"""Checks that a schedule runs each task of a step once, with the right data, within memory, and to the end.

The check shares no code with the search or the lowering: it reads the actions one by one, first each row by itself,
then the two ends of every channel, then all rows together with a clock (``replay``). A cell has one canonical form: its
text names the action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, plan_of, wrong_cell
from mosaic.pipelining.tasks import ActionKind, TaskGraph, Timed

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


_Place = tuple[int, int]
"""Row, and place in it."""


def check_pipeline_schedule(
    schedule: PipelineSchedule, graph: TaskGraph, *, training: Collection[int] | None = None
) -> Timed:
    """Checks a schedule against the tasks of its step; returns their times, with messages in their channels' order.

    Args:
        schedule: The schedule.
        graph: The expected tasks, with times and memory.
        training: Chunks whose gradients must be reduced; None: those that the schedule reduces.

    Raises:
        InvalidScheduleError: It is of another plan, an action is missing, twice, in a wrong row or at a wrong place,
            both ends of a channel differ, rows wait for each other for ever, or memory does not suffice; has the cell.
    """
    plan = plan_of(graph, schedule.chunks)
    if schedule.plan != plan or schedule.rank_of != graph.rank_of:
        raise InvalidScheduleError(
            f"the schedule is of plan {schedule.plan}, and this one is {plan}; make the schedule again"
        )
    step = Step.of(graph)
    _check_sizes(schedule, step)
    checks = _Checks(schedule=schedule, step=step, where=_find(schedule))
    checks.check_tasks()
    checks.check_messages()
    checks.check_frees()
    checks.check_reduces(training)
    rows: Rows = [[split(cell) for cell in row] for row in schedule.rows]
    _check_channels(schedule, step, rows)
    return replay(schedule, step, rows)


def _check_sizes(schedule: PipelineSchedule, step: Step) -> None:
    edges = {message: step.graph.waits[at].num_bytes for message, at in step.edges.items()}
    for field, own, expected in (("edges", schedule.edges, edges), ("kept", schedule.kept, step.kept)):
        mismatch = next((name for name in expected.keys() | own.keys() if own.get(name) != expected.get(name)), None)
        if mismatch is not None:
            raise InvalidScheduleError(
                f"{field}: {mismatch} has {own.get(mismatch)} bytes, and the step's tasks say "
                f"{expected.get(mismatch)}; make the schedule again"
            )


def _find(schedule: PipelineSchedule) -> dict[str, _Place]:
    where: dict[str, _Place] = {}
    for row, cells in enumerate(schedule.rows):
        for place, cell in enumerate(cells):
            if cell in where:
                raise wrong_cell(
                    schedule, row, place, f"it is also action {where[cell][1]} of row {where[cell][0]}; once"
                )
            where[cell] = row, place
    return where


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """Checks of each row by itself."""

    schedule: PipelineSchedule
    step: Step
    where: dict[str, _Place]
    """Place of each action."""

    def check_tasks(self) -> None:
        """Checks that every task is once in its row, after its inputs of the row."""
        for cell, (row, place) in self.where.items():
            if split(cell)[0] is None and self.step.row.get(cell) != row:
                raise wrong_cell(self.schedule, row, place, "the step has no such task in this row")
        for name, row in self.step.row.items():
            if name not in self.where:
                raise self._missing(row, name)
        for message in self.step.edges:
            source, target = message.split(">")
            if self.step.row[source] == self.step.row[target] and self.where[source] > self.where[target]:
                problem = f"it needs {source}, which comes later in its row; put it before"
                raise wrong_cell(self.schedule, *self.where[target], problem)

    def check_messages(self) -> None:
        """Checks that every message is sent after its source, received before its target, and awaited at both ends."""
        for cell, (row, place) in self.where.items():
            verb, message = split(cell)
            source, arrow, target = message.partition(">")
            if not arrow:
                continue
            if message not in self.step.channels:
                raise wrong_cell(self.schedule, row, place, "the step hands nothing of that name to another rank")
            end = source if verb in ("SEND", "SENT") else target
            if self.step.row[end] != row:
                raise wrong_cell(self.schedule, row, place, f"it belongs into row {self.step.row[end]}, to {end}")
        for message, (sender, receiver, _) in self.step.channels.items():
            source, target = message.split(">")
            self._check_in_turn((source, f"SEND({message})", f"SENT({message})"), sender)
            self._check_in_turn((f"RECV({message})", f"GOT({message})", target), receiver)

    def check_frees(self) -> None:
        """Checks that activations are freed after the last phase of their chunk with the same piece."""
        last: dict[tuple[int, int, int], str] = {}
        for text in self.step.row:
            name = TaskName.parse(text)
            key = name.chunk, name.microbatch, name.piece
            if key not in last or self.where[last[key]] < self.where[text]:
                last[key] = text
        for text in self.step.kept:
            name = TaskName.parse(text)
            row = self.step.row[text]
            self._check_in_turn((last[name.chunk, name.microbatch, name.piece], f"FREE({text})"), row)
        for cell, (row, place) in self.where.items():
            verb, what = split(cell)
            if verb == "FREE" and (what not in self.step.kept or self.step.row[what] != row):
                raise wrong_cell(self.schedule, row, place, "nothing of that name is kept in this row")

    def check_reduces(self, training: Collection[int] | None) -> None:
        """Checks that gradients are reduced after the last backward of their chunk."""
        last: dict[int, str] = {}
        for text in self.step.row:
            name = TaskName.parse(text)
            is_later = name.chunk not in last or self.where[last[name.chunk]] < self.where[text]
            if name.kind is not ActionKind.FORWARD and is_later:
                last[name.chunk] = text
        reduced = {int(split(cell)[1]): place for cell, place in self.where.items() if split(cell)[0] == "REDUCE"}
        for chunk, (row, place) in reduced.items():
            if chunk not in last or (training is not None and chunk not in training):
                raise wrong_cell(self.schedule, row, place, "that chunk has no gradients to reduce")
        for chunk in sorted(reduced.keys() | set(training or ()) & last.keys()):
            self._check_in_turn((last[chunk], f"REDUCE({chunk})"), self.step.row[last[chunk]])

    def _check_in_turn(self, cells: Sequence[str], row: int) -> None:
        """Checks that actions are in one row, in this order."""
        for before, cell in zip(("", *cells), cells, strict=False):
            if cell not in self.where:
                raise self._missing(row, cell)
            if before and (self.where[before] > self.where[cell] or self.where[cell][0] != row):
                raise wrong_cell(self.schedule, *self.where[cell], f"it belongs behind {before}, in row {row}")

    def _missing(self, row: int, cell: str) -> InvalidScheduleError:
        return wrong_cell(self.schedule, row, len(self.schedule.rows[row]), f"{cell} is missing; do it once")


def _check_channels(schedule: PipelineSchedule, step: Step, rows: Rows) -> None:
    """Checks that both ends of a channel name the same messages in the same order."""
    sent: dict[object, list[str]] = defaultdict(list)
    for row in rows:
        for verb, message in row:
            if verb == "SEND":
                sent[step.channels[message]].append(message)
    num_received: dict[object, int] = defaultdict(int)
    for number, row in enumerate(rows):
        for place, (verb, message) in enumerate(row):
            if verb == "RECV":
                channel = step.channels[message]
                other = sent[channel][num_received[channel]]
                num_received[channel] += 1
                if other != message:
                    problem = (
                        f"row {channel[0]} sends {other} as its {num_received[channel]}. one; post both ends alike"
                    )
                    raise wrong_cell(schedule, number, place, problem)
