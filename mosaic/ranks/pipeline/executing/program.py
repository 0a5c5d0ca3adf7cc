"""A schedule made ready for one rank: numbers and tuples instead of texts, so that executing it reads none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, Verb
from mosaic.pipelining.tasks import ActionKind
from mosaic.ranks.pipeline.transports.transport import Message, Tensors, TensorSpec


class Edge(NamedTuple):
    """What one task hands to another; ``str`` gives ``2F0>5F0``."""

    source: TaskName
    """Who makes it."""
    target: TaskName
    """Whom it is for."""

    def __str__(self) -> str:
        return f"{self.source}>{self.target}"


class Work(Protocol):
    """The chunks of one rank in one step. Mappings are by the task at the other end of an edge.

    Tensors that leave take no part in any graph, and nobody writes to them until the executor has let go of them.
    """

    def forward(self, task: TaskName, inputs: Mapping[TaskName, Tensors]) -> Tensors | Mapping[TaskName, Tensors]:
        """Computes a forward.

        Args:
            task: Which.
            inputs: From each forward that feeds it, in the order of its arguments.

        Returns:
            What every forward that it feeds is given, or for each of them what it is given.
        """

    def backward(self, task: TaskName, gradients: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        """Computes a backward.

        Args:
            task: Which; ``2B0.1`` is the backward of ``2F0.1``.
            gradients: Of what its forward handed out, from each backward that has some; empty where the loss is its
                own.

        Returns:
            For each backward that waits for it the gradients of what that one's forward handed to this one's.
        """

    def weights(self, task: TaskName) -> None:
        """Computes a backward for weights that is a task of its own."""

    def free(self, task: TaskName) -> None:
        """Lets go of what a forward kept."""

    def reduce(self, chunk: int) -> None:
        """Sums the gradients of a chunk over its data-parallel ranks."""

    def specs(self, edge: Edge) -> tuple[TensorSpec, ...]:
        """Returns shapes and types of what crosses an edge between ranks; both of them have to return the same."""


_POSTS = (f"{Verb.SEND}(", f"{Verb.RECEIVE}(")


def rows_of_rank(schedule: PipelineSchedule, rank: int) -> tuple[tuple[str, ...], ...]:
    """Returns what each lane of a rank does, in order."""
    return tuple(row for row, other in zip(schedule.rows, schedule.rank_of, strict=True) if other == rank)


def order_of(schedule: PipelineSchedule, rank: int) -> tuple[int, ...]:
    """Returns the order in which one thread does what a rank's lanes do: for each action its lane.

    Raises:
        InvalidScheduleError: No order suits both the lanes and the other ranks.
    """
    rows = rows_of_rank(schedule, rank)
    return _Walk(schedule, rank).run() if len(rows) > 1 else (0,) * sum(map(len, rows))


class _Walk:
    """All rows under way."""

    def __init__(self, schedule: PipelineSchedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.at = [0] * len(schedule.rows)
        self.done: set[str] = set()
        self.posting: dict[str, int] = {}
        """For each message of which one end is due the row that stands there."""
        self.merged: list[int] = []
        ranks = schedule.rank_of
        self.lane = [ranks[:row].count(ranks[row]) for row in range(len(ranks))]
        home = {
            cell: other
            for other, row in zip(schedule.rank_of, schedule.rows, strict=True)
            for cell in row
            if cell[-1] != ")"
        }
        self.needs: defaultdict[str, list[str]] = defaultdict(list)
        for edge in schedule.edges:
            source, _, target = edge.partition(">")
            if home.get(source) == home.get(target):
                self.needs[target].append(source)

    def run(self) -> tuple[int, ...]:
        has_moved = True
        while has_moved:
            has_moved = False
            for row in range(len(self.at)):
                has_moved |= self._go_on(row)
        rows = self.schedule.rows
        stuck = next((row for row in range(len(rows)) if self.at[row] < len(rows[row])), None)
        if stuck is not None:
            raise InvalidScheduleError(
                f"rank {self.rank} has lanes that cannot come to their end: row {stuck} would wait for ever at "
                f"{rows[stuck][self.at[stuck]]}; post both ends of each message at one point, as lower does",
                grid=self.schedule.text,
            )
        return tuple(self.merged)

    def _go_on(self, row: int) -> bool:
        """Takes actions of a row until it has computed a task or cannot go on; returns whether it took any."""
        cells, has_moved = self.schedule.rows[row], False
        while self.at[row] < len(cells):
            cell = cells[self.at[row]]
            if cell.startswith(_POSTS):
                other = self.posting.setdefault(cell.partition("(")[2], row)
                if other == row:
                    return has_moved
                self._take(other)
            elif not all(source in self.done for source in self.needs.get(cell, ())):
                return has_moved
            self._take(row)
            has_moved = True
            if cell[-1] != ")":
                return True
        return has_moved

    def _take(self, row: int) -> None:
        cell = self.schedule.rows[row][self.at[row]]
        self.at[row] += 1
        self.done.add(cell)
        if self.schedule.rank_of[row] == self.rank:
            self.merged.append(self.lane[row])


FORWARD, BACKWARD, WEIGHTS, SEND, SENT, RECEIVE, GOT, FREE, REDUCE = range(9)
"""What an action does."""

_OF_KIND = {ActionKind.FORWARD: FORWARD, ActionKind.BACKWARD: BACKWARD, ActionKind.WEIGHTS: WEIGHTS}
_OF_VERB = {"SEND": SEND, "SENT": SENT, "RECV": RECEIVE, "GOT": GOT}
_POSTED_BY = {"SENT": "SEND", "GOT": "RECV"}

Action = tuple[int, int, Any, tuple["Exit", ...]]
"""Its code; the place of its task or message, or -1; its task or chunk; and where what it makes or gets goes."""
Row = tuple[Action, ...]
"""What one lane does, in order."""
Exit = tuple[TaskName, int, int]
"""Whom an output is for; the place of that task on this rank, or -1, and the message that takes it there, or -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one rank does in one step."""

    cells: tuple[tuple[str, ...], ...]
    """For each lane the text of each action, for messages and pictures."""
    rows: tuple[Row, ...]
    """The same, as the executor has them."""
    order: tuple[int, ...]
    """How one thread does all of it: for each action its lane, whose next one it is."""
    after: Mapping[int, tuple[int, ...]]
    """For places of tasks that take something of other lanes of this rank the places of what they come after."""
    inputs: tuple[tuple[TaskName, ...], ...]
    """For each task whose outputs or gradients it is given, in the order of its arguments."""
    messages: tuple[Message, ...]
    """All that this rank sends or receives."""

    @property
    def carried(self) -> dict[int, str]:
        """For each other rank what is sent to it and received from it, by channel, to be compared with its own."""
        found: dict[int, str] = {}
        for message in sorted(self.messages, key=lambda each: each.name):
            found[message.peer] = found.get(message.peer, "") + f"{message.name} {', '.join(map(str, message.specs))}\n"
        return found


def program_of(
    schedule: PipelineSchedule, rank: int, work: Work, *, names: dict[str, TaskName] | None = None
) -> Program:
    """Makes a schedule ready for a rank.

    Args:
        schedule: Of all ranks.
        rank: Which.
        work: Asked for what messages carry.
        names: Of tasks that were read before, and those that are now: steps have most of them in common.

    Raises:
        InvalidScheduleError: An action comes before what it needs of this rank, or is missing; or lanes of the rank
            wait for each other for ever. ``check_pipeline_schedule`` finds more.
    """
    return _Reading(schedule, rank, work, {} if names is None else names).read()


class _Reading:
    """A schedule as it is read."""

    def __init__(self, schedule: PipelineSchedule, rank: int, work: Work, names: dict[str, TaskName]) -> None:
        self.schedule, self.rank, self.work, self.names = schedule, rank, work, names
        self.rows = rows_of_rank(schedule, rank)
        lanes: Counter[int] = Counter()
        self.home: dict[str, tuple[int, int]] = {}
        """For each task its rank, and its lane there."""
        for other, row in zip(schedule.rank_of, schedule.rows, strict=True):
            self.home |= dict.fromkeys((cell for cell in row if cell[-1] != ")"), (other, lanes[other]))
            lanes[other] += 1
        tasks = dict.fromkeys(cell for row in self.rows for cell in row if cell[-1] != ")")
        self.place = {cell: place for place, cell in enumerate(tasks)}
        self.inputs: list[list[TaskName]] = [[] for _ in self.place]
        self.exits: list[list[Exit]] = [[] for _ in self.place]
        self.before: list[list[str]] = [[] for _ in self.place]
        """For each task the cells of its lane that have to come before it."""
        self.after: dict[int, list[int]] = {}
        """For each task the places of those of other lanes."""
        self.messages: list[Message] = []
        self.number: dict[str, int] = {}
        self.sends: list[bool] = []
        """For each message whether this rank is its sender."""

    def read(self) -> Program:
        for edge in self.schedule.edges:
            source, _, target = edge.partition(">")
            if source not in self.home or target not in self.home:
                raise self._wrong(edge, "no row has one of its tasks; make the schedule again")
            if self.rank in (self.home[source][0], self.home[target][0]):
                self._add_edge(edge, source, target)
        rows = []
        for cells in self.rows:
            done: set[str] = set()
            actions = []
            for cell in cells:
                actions.append(self._action(cell, done))
                done.add(cell)
            rows.append(tuple(actions))
        self._check_awaited()
        return Program(
            cells=self.rows,
            rows=tuple(rows),
            order=order_of(self.schedule, self.rank),
            inputs=tuple(map(tuple, self.inputs)),
            after={place: tuple(found) for place, found in self.after.items()},
            messages=tuple(self.messages),
        )

    def _check_awaited(self) -> None:
        done = {cell for cells in self.rows for cell in cells}
        for message, number in self.number.items():
            awaits = f"{'SENT' if self.sends[number] else 'GOT'}({message})"
            if awaits not in done:
                raise self._wrong(awaits, "it is missing; both ends of a message are posted and awaited once")

    def _add_edge(self, edge: str, source: str, target: str) -> None:
        place = self.place
        is_here = source in place, target in place
        ends = Edge(self._name(source), self._name(target))
        carries = ends.source.kind is ends.target.kind and ends.source.kind is not ActionKind.WEIGHTS
        if not all(is_here) and not carries:
            raise self._wrong(edge, "between ranks go outputs of forwards and gradients, and this is neither")
        message = -1
        if not all(is_here):
            message = self.number[edge] = len(self.messages)
            peer, _ = self.home[target if is_here[0] else source]
            is_forward = ends.source.kind is ActionKind.FORWARD
            lanes = self.home[source][1], self.home[target][1]
            self.sends.append(is_here[0])
            self.messages.append(Message(edge, peer, is_forward, tuple(self.work.specs(ends)), lanes))
        if all(is_here) and self.home[source] != self.home[target]:
            self.after.setdefault(place[target], []).append(place[source])
        elif is_here[1]:
            self.before[place[target]].append(source if is_here[0] else f"GOT({edge})")
        if is_here[1] and carries:
            self.inputs[place[target]].append(ends.source)
        if is_here[0] and carries:
            self.exits[place[source]].append((ends.target, place.get(target, -1), message))

    def _action(self, cell: str, done: set[str]) -> Action:
        if cell[-1] != ")":
            task, place = self._name(cell), self.place[cell]
            self._check_before(cell, self.before[place], done)
            return _OF_KIND[task.kind], place, task, tuple(self.exits[place])
        verb, _, inner = cell[:-1].partition("(")
        if verb == "FREE":
            self._check_before(cell, [inner], done)
            return FREE, -1, self._name(inner), ()
        if verb == "REDUCE":
            return REDUCE, -1, int(inner), ()
        number = self.number.get(inner)
        if number is None or (verb in ("SEND", "SENT")) != self.sends[number]:
            raise self._wrong(cell, "no edge of the schedule leaves or reaches this rank so; make the schedule again")
        source, _, target = inner.partition(">")
        if verb == "SEND":
            self._check_before(cell, [source], done)
        else:
            self._check_before(cell, [f"{_POSTED_BY[verb]}({inner})"] if verb in _POSTED_BY else [], done)
        arrives = ((self.names[source], self.place[target], -1),) if verb == "GOT" else ()
        return _OF_VERB[verb], number, None, arrives

    def _name(self, text: str) -> TaskName:
        """Returns a task's name; the same one each time, so that mappings find it at once."""
        name = self.names.get(text)
        if name is None:
            name = self.names[text] = TaskName.parse(text)
        return name

    def _check_before(self, cell: str, needed: list[str], done: set[str]) -> None:
        missing = next((each for each in needed if each not in done), None)
        if missing is not None or cell in done:
            problem = f"{missing} has to come before it" if missing is not None else "it is there twice; do it once"
            raise self._wrong(cell, problem)

    def _wrong(self, cell: str, problem: str) -> InvalidScheduleError:
        return InvalidScheduleError(f"rank {self.rank}, {cell}: {problem}", grid=self.schedule.text)
