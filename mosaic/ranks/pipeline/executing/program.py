"""A schedule made ready for one rank: numbers and tuples instead of texts, so that executing it reads none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.ranks.pipeline.executing.lanes import order_of, rows_of_rank
from mosaic.ranks.pipeline.executing.work import Edge, Work
from mosaic.ranks.pipeline.transports.transport import Message

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
