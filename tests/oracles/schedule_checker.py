"""Checks that a schedule runs each task of a step once, with the right data, within memory, and to the end.

The check shares no code with the search or the lowering: it reads the actions one by one, first each row by itself,
then the two ends of every channel, then all rows together with a clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, plan_of, wrong_cell
from mosaic.pipelining.tasks import ActionKind, TaskGraph, Timed


def check_pipeline_schedule(
    schedule: PipelineSchedule, graph: TaskGraph, *, training: Collection[int] | None = None
) -> Timed:
    """Returns the times of tasks, with messages in their channels' order; raises InvalidScheduleError with the cell.

    ``training`` has the chunks whose gradients must be reduced; by default those that the schedule reduces.
    """
    plan = plan_of(graph, schedule.chunks)
    if schedule.plan != plan or schedule.rank_of != graph.rank_of:
        raise InvalidScheduleError(f"the schedule is of plan {schedule.plan}, and this one is {plan}")
    check = _Rows(schedule, graph)
    check.rows(training)
    check.channels_alike()
    return _Clock(check).run()


class _Rows:
    """The tasks of a step by their texts, and checks of a schedule's rows."""

    def __init__(self, schedule: PipelineSchedule, graph: TaskGraph) -> None:
        self.schedule, self.graph = schedule, graph
        names = [str(TaskName.of(task)) for task in graph.tasks]
        self.index = {name: at for at, name in enumerate(names)}
        self.row = {name: task.row for name, task in zip(names, graph.tasks, strict=True)}
        self.waits = {f"{names[wait.source]}>{names[wait.target]}": wait for wait in graph.waits}
        self.local: dict[str, list[str]] = defaultdict(list)  # inputs of each task on its own rank
        self.channels: dict[str, tuple[int, int, bool]] = {}  # rows of each message, and True for forwards
        for edge, wait in self.waits.items():
            source, target = graph.tasks[wait.source], graph.tasks[wait.target]
            if graph.rank_of[source.row] == graph.rank_of[target.row]:
                self.local[names[wait.target]].append(names[wait.source])
            else:
                self.channels[edge] = source.row, target.row, source.kind is ActionKind.FORWARD
        left = {name: task.takes_bytes - task.frees_bytes for name, task in zip(names, graph.tasks, strict=True)}
        self.kept = {name: size for name, size in left.items() if size > 0 and "F" in name}
        # bytes that a backward for inputs leaves for the backward for weights to free
        self.for_weights = {name.replace("B", "W"): size for name, size in left.items() if size > 0 and "B" in name}
        edges = {edge: wait.num_bytes for edge, wait in self.waits.items()}
        assert (schedule.edges, schedule.kept) == (edges, self.kept)
        self.actions = [[_split(cell) for cell in row] for row in schedule.rows]
        self.where: dict[str, tuple[int, int]] = {}
        for row, cells in enumerate(schedule.rows):
            for place, cell in enumerate(cells):
                if cell in self.where:
                    raise wrong_cell(schedule, row, place, f"it is also action {self.where[cell]}; once")
                self.where[cell] = row, place

    def rows(self, training: Collection[int] | None) -> None:
        """Checks that each action of the step is once in its row, behind those that it needs there, and no other is."""
        known: set[str] = set()
        for row, cells in self._chains(training):
            known.update(cells)
            for before, cell in zip(("", *cells), cells, strict=False):
                if cell not in self.where:
                    raise wrong_cell(self.schedule, row, len(self.schedule.rows[row]), f"{cell} is missing; do it once")
                if self.where[cell][0] != row:
                    raise wrong_cell(self.schedule, *self.where[cell], f"it belongs into row {row}")
                if before and self.where[before] > self.where[cell]:
                    raise wrong_cell(self.schedule, *self.where[cell], f"it belongs behind {before}")
        for cell, place in self.where.items():
            if cell not in known:
                raise wrong_cell(self.schedule, *place, "the step has no such action; leave it out")

    def _chains(self, training: Collection[int] | None) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yields actions that are in one row in this order, with the row."""
        last: dict[tuple[int, int, int], tuple[str, str]] = {}  # first and last phase of each chunk with a piece
        for (name, row), task in zip(self.row.items(), self.graph.tasks, strict=True):
            yield row, (name,)
            key = task.chunk, task.microbatch, task.piece
            last[key] = last.get(key, (name,))[0], name
            reduced = f"REDUCE({task.chunk})"
            is_reduced = reduced in self.where if training is None else task.chunk in training
            if is_reduced and task.kind is not ActionKind.FORWARD:
                yield row, (name, reduced)
        for edge in self.waits:
            source, target = edge.split(">")
            if self.row[source] == self.row[target]:
                yield self.row[source], (source, target)
        for message, (sender, receiver, _) in self.channels.items():
            source, target = message.split(">")
            yield sender, (source, f"SEND({message})", f"WAIT_SEND({message})")
            yield receiver, (f"RECV({message})", f"WAIT_RECV({message})", target)
        for forward, end in last.values():
            if forward in self.kept:
                yield self.row[forward], (end, f"FREE({forward})")

    def channels_alike(self) -> None:
        """Checks that both ends of a channel name the same messages in the same order."""
        sent: dict[object, list[str]] = defaultdict(list)
        for row in self.actions:
            for verb, message in row:
                if verb == "SEND":
                    sent[self.channels[message]].append(message)
        for number, row in enumerate(self.actions):
            for place, (verb, message) in enumerate(row):
                if verb == "RECV" and (other := sent[self.channels[message]].pop(0)) != message:
                    raise wrong_cell(self.schedule, number, place, f"{other} is sent at this point; post both alike")


def _split(cell: str) -> tuple[str | None, str]:
    """Returns a cell's verb, None for computation, and its object: a task, a message, or a chunk."""
    verb, parenthesis, inner = cell.partition("(")
    return (verb, inner[:-1]) if parenthesis else (None, cell)


class _Clock:
    """All rows together, with a clock each."""

    def __init__(self, check: _Rows) -> None:
        self.check, self.graph = check, check.graph
        self.at, self.clock = [0] * len(check.actions), [0] * len(check.actions)
        self.start: dict[str, int] = {}
        self.end: dict[str, int] = {}
        self.arrival: dict[str, int] = {}
        self.posted: set[str] = set()
        self.busy: dict[tuple[int, int, bool], int] = defaultdict(int)
        self.began = [-1] * len(check.actions)
        # changes of each rank: time, order at that time, place in the row, number, bytes, and the cell
        self.memory: list[list[tuple[int, int, int, int, int, tuple[int, int]]]] = [
            [] for _ in range(self.graph.num_ranks)
        ]

    def run(self) -> Timed:
        has_moved = True
        while has_moved:
            has_moved = False
            for row, actions in enumerate(self.check.actions):
                while self.at[row] < len(actions) and self._advance(row, *actions[self.at[row]]):
                    self.at[row] += 1
                    has_moved = True
        schedule = self.check.schedule
        waiting = [row for row, actions in enumerate(self.check.actions) if self.at[row] < len(actions)]
        if waiting:
            stuck, *others = waiting
            standing = ", ".join(f"row {row} stands at {schedule.rows[row][self.at[row]]}" for row in others)
            raise wrong_cell(schedule, stuck, self.at[stuck], f"it waits for ever; {standing}")
        return Timed(
            start_ns=[self.start[name] for name in self.check.index],
            makespan_ns=max(self.end.values(), default=0),
            peak_bytes=tuple(map(self._peak, range(self.graph.num_ranks))),
        )

    def _advance(self, row: int, verb: str | None, subject: str) -> bool:
        """Runs an action, or returns False if it has to wait."""
        if verb is None:
            return self._compute(row, subject)
        if verb == "SEND":
            channel = self.check.channels[subject]
            arrival = self.clock[row] + self.check.waits[subject].lag_ns
            self.arrival[subject] = self.busy[channel] = max(self.busy[channel], arrival)
        elif verb == "RECV":
            self.posted.add(subject)
        elif verb == "FREE":
            self._note(row, -self.check.kept[subject], self.clock[row])
        elif verb in ("WAIT_SEND", "WAIT_RECV"):
            if subject not in self.arrival or subject not in self.posted:
                return False
            if verb == "WAIT_RECV":
                self.clock[row] = max(self.clock[row], self.arrival[subject])
        return True

    def _compute(self, row: int, name: str) -> bool:
        inputs = self.check.local.get(name, ())
        if any(source not in self.end for source in inputs):
            return False
        task = self.graph.tasks[self.check.index[name]]
        self.start[name] = self.began[row] = max([self.clock[row], *(self.end[source] for source in inputs)])
        self.end[name] = self.clock[row] = self.start[name] + task.time_ns
        self._note(row, task.takes_bytes, self.start[name])
        temporary = min(task.frees_bytes, task.takes_bytes)
        self._note(row, -temporary - self.check.for_weights.get(name, 0), self.end[name])
        return True

    def _note(self, row: int, change: int, at_ns: int) -> None:
        """Records a change of memory: at one instant ends come before starts, and starts in the row's order."""
        order = int(change > 0 or self.began[row] == at_ns)
        changes = self.memory[self.graph.rank_of[row]]
        changes.append((at_ns, order, self.at[row], len(changes), change, (row, self.at[row])))

    def _peak(self, rank: int) -> int:
        limit = self.graph.limit_bytes[rank] if self.graph.limit_bytes else 0
        peak = used = self.graph.base_bytes[rank] if self.graph.base_bytes else 0
        for *_, change, place in sorted(self.memory[rank]):
            used += change
            peak = max(peak, used)
            if limit and used > limit:
                raise wrong_cell(self.check.schedule, *place, f"its rank uses {used - limit} bytes more than it has")
        return peak
