"""A schedule compiled for one rank: its actions as numbers and tuples, so that a step parses no text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, Verb
from mosaic.pipelining.tasks import ActionKind
from mosaic.ranks.pipeline.transport import Message, Tensors, TensorSpec


class Edge(NamedTuple):
    """Data from one task to another; ``str`` gives ``2F0>5F0``."""

    source: TaskName
    target: TaskName

    def __str__(self) -> str:
        return f"{self.source}>{self.target}"


@dataclass(slots=True, kw_only=True)
class RankTask:
    """A task of this rank with its edges to tasks of the same phase; only the compiler writes to it."""

    name: TaskName
    sources: list[TaskName] = field(default_factory=list)
    """Tasks that feed it, in the order of its arguments."""
    targets: list[TaskName] = field(default_factory=list)
    """Tasks that it feeds."""
    exits: list[tuple[TaskName, int, int]] = field(default_factory=list)
    """For each target its index on this rank, or -1, and the index of the message that carries it there, or -1."""
    after: list[int] = field(default_factory=list)
    """Indices of the tasks in other lanes of this rank that it reads from."""
    wanted: set[TaskName] = field(default_factory=set)
    """Of a forward: the sources that take a gradient from its backward."""
    has_backward: bool = False
    """True for a forward with a backward."""


class Work(Protocol):
    """The computation of one rank in one step. Mappings are by the task at the other end of an edge.

    Returned tensors take no part in any graph, and nobody writes to them until the executor has released them.
    """

    def forward(self, task: RankTask, inputs: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        """Computes a forward from the outputs of its sources; returns its own by target."""

    def backward(self, task: RankTask, gradients: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        """Computes a backward from gradients of its forward's outputs; returns those of its inputs by target."""

    def free(self, task: TaskName) -> None:
        """Releases the activations of a forward."""

    def reduce(self, chunk: int) -> None:
        """Sums the gradients of a chunk over its data-parallel ranks."""

    def specs(self, edge: Edge) -> tuple[TensorSpec, ...]:
        """Returns shapes and types of the tensors of an edge between ranks, equal at both ends."""


FORWARD, BACKWARD, SEND, WAIT_SEND, RECEIVE, WAIT_RECEIVE, FREE, REDUCE = range(8)

_OF_VERB = {
    Verb.SEND: SEND,
    Verb.AWAIT_SENT: WAIT_SEND,
    Verb.RECEIVE: RECEIVE,
    Verb.AWAIT_RECEIVED: WAIT_RECEIVE,
}

Action = tuple[int, int, Any]
"""Its code, the index of its task or message, or -1, and its subject: a task, a chunk, or who receives from whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The actions of one rank in one step."""

    cells: tuple[tuple[str, ...], ...]
    """Text of each action, by lane."""
    rows: tuple[tuple[Action, ...], ...]
    """The same actions, compiled."""
    turns: tuple[int, ...]
    """The lane of each action, in an order of all actions for one thread."""
    tasks: tuple[RankTask, ...]
    messages: tuple[Message, ...]
    """Messages that this rank sends or receives."""


def compile_program(
    schedule: PipelineSchedule, rank: int, work: Work, *, names: dict[str, TaskName] | None = None
) -> Program:
    """Compiles a schedule, as ``lower`` makes it, for a rank; ``names`` caches parsed tasks from step to step.

    Raises:
        InvalidScheduleError: An edge has no tasks, or lanes have no order on one thread.
    """
    return _Compiler(schedule, rank, work, {} if names is None else names).compile()


class _Compiler:
    def __init__(self, schedule: PipelineSchedule, rank: int, work: Work, names: dict[str, TaskName]) -> None:
        self.schedule, self.rank, self.work, self.names = schedule, rank, work, names
        self.rows = schedule.rows_of(rank)
        lanes: Counter[int] = Counter()
        self.home: dict[str, tuple[int, int]] = {}
        """Rank and lane of each task."""
        for other, row in zip(schedule.rank_of, schedule.rows, strict=True):
            self.home |= dict.fromkeys((cell for cell in row if cell[-1] != ")"), (other, lanes[other]))
            lanes[other] += 1
        cells = dict.fromkeys(cell for row in self.rows for cell in row if cell[-1] != ")")
        self.index = {cell: index for index, cell in enumerate(cells)}
        self.tasks = [RankTask(name=self._name(cell)) for cell in cells]
        self.messages: list[Message] = []
        self.message_index: dict[str, int] = {}

    def compile(self) -> Program:
        for edge in self.schedule.edges:
            source, _, target = edge.partition(">")
            if source not in self.home or target not in self.home:
                raise self._error(edge, "no row has one of its tasks; make the schedule again")
            if self.rank in (self.home[source][0], self.home[target][0]):
                self._add_edge(edge, source, target)
        return Program(
            cells=self.rows,
            rows=tuple(tuple(map(self._action, cells)) for cells in self.rows),
            turns=self._turns(),
            tasks=tuple(self.tasks),
            messages=tuple(self.messages),
        )

    def _turns(self) -> tuple[int, ...]:
        counts = [len(row) for row in self.rows]
        if len(counts) < 2:
            return (0,) * sum(counts)
        turns = self.schedule.turns[self.rank] if self.schedule.turns else ()
        if [turns.count(lane) for lane in range(len(counts))] != counts:
            raise InvalidScheduleError(
                f"rank {self.rank} has lanes of {counts} actions, and turns for {len(turns)}; lower the schedule again",
                grid=self.schedule.text,
            )
        return turns

    def _add_edge(self, edge: str, source: str, target: str) -> None:
        ends = Edge(self._name(source), self._name(target))
        here, there = self.index.get(source, -1), self.index.get(target, -1)
        message, is_forward = -1, ends.source.kind is ActionKind.FORWARD
        if here < 0 or there < 0:
            message = self.message_index[edge] = len(self.messages)
            peer, _ = self.home[target if here >= 0 else source]
            lanes = self.home[source][1], self.home[target][1]
            self.messages.append(Message(edge, peer, is_forward, tuple(self.work.specs(ends)), lanes))
        elif self.home[source] != self.home[target]:
            self.tasks[there].after.append(here)
        if ends.source.kind is not ends.target.kind:
            self.tasks[here].has_backward = True
            return
        if there >= 0:
            self.tasks[there].sources.append(ends.source)
        if here >= 0:
            self.tasks[here].targets.append(ends.target)
            self.tasks[here].exits.append((ends.target, there, message))
            if not is_forward:
                forward = self.tasks[self.index[str(ends.source.forward)]]
                forward.wanted.add(ends.target.forward)

    def _action(self, cell: str) -> Action:
        if cell[-1] != ")":
            index = self.index[cell]
            task = self.tasks[index]
            if task.name.kind is ActionKind.WEIGHTS:
                raise self._error(cell, "ranks run backward for weights with backward for inputs; use another baseline")
            return FORWARD if task.name.kind is ActionKind.FORWARD else BACKWARD, index, task
        verb, _, inner = cell[:-1].partition("(")
        if verb == Verb.FREE:
            return FREE, -1, self._name(inner)
        if verb == Verb.REDUCE:
            return REDUCE, -1, int(inner)
        source, _, target = inner.partition(">")
        code = _OF_VERB[Verb(verb)]
        arrives = (self.names[source], self.index[target]) if code == WAIT_RECEIVE else None
        return code, self.message_index[inner], arrives

    def _name(self, text: str) -> TaskName:
        """Returns a task's name, the same object each time, for quick look-ups."""
        name = self.names.get(text)
        if name is None:
            name = self.names[text] = TaskName.parse(text)
        return name

    def _error(self, cell: str, problem: str) -> InvalidScheduleError:
        return InvalidScheduleError(f"rank {self.rank}, {cell}: {problem}", grid=self.schedule.text)
