"""Executes the actions of a schedule on one rank: tasks by the rank's work, messages by its transport.

A schedule is compiled once into numbers and tuples, so that a step parses no text. A rank on which an action fails
aborts the others, which end with an error that names it, the action and the reason.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

from mosaic.backends.base import Lane, Lanes
from mosaic.backends.streams.lanes import StreamLane, StreamLanes, StreamTicket
from mosaic.engine.calls.thread_state import Applied, ThreadState, forget_cast_weights, interception
from mosaic.errors import InvalidScheduleError, ModuleContractError, RankFailedError
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, Verb
from mosaic.pipelining.tasks import ActionKind
from mosaic.ranks.pipeline.transport import LanePair, Message, Pending, Tensors, TensorSpec, Transport


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


Action = tuple[ActionKind | Verb, int, Any]
"""Its kind, the index of its task or message, or -1, and its subject: a task, a chunk, the messages that it posts
together, or who receives from whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    cells: tuple[tuple[str, ...], ...]
    """Text of each action, by lane."""
    rows: tuple[tuple[Action, ...], ...]
    """The same actions, compiled."""
    turns: tuple[int, ...]
    """The lane of each action, in an order of all actions for one thread."""
    tasks: tuple[RankTask, ...]
    messages: tuple[Message, ...]
    """Messages that this rank sends or receives."""


_task_name = lru_cache(maxsize=100_000)(TaskName.parse)
"""The same object each time, for quick look-ups."""


class _Compiler:
    """Compiles a schedule, as ``lower`` makes it, for one rank."""

    def __init__(self, schedule: PipelineSchedule, rank: int, work: Work) -> None:
        self.schedule, self.rank, self.work = schedule, rank, work
        self.rows = schedule.rows_of(rank)
        lanes: Counter[int] = Counter()
        self.home: dict[str, tuple[int, int]] = {}
        """Rank and lane of each task."""
        for other, row in zip(schedule.rank_of, schedule.rows, strict=True):
            self.home |= dict.fromkeys((cell for cell in row if cell[-1] != ")"), (other, lanes[other]))
            lanes[other] += 1
        cells = dict.fromkeys(cell for row in self.rows for cell in row if cell[-1] != ")")
        self.index = {cell: index for index, cell in enumerate(cells)}
        self.tasks = [RankTask(name=_task_name(cell)) for cell in cells]
        self.messages: list[Message] = []
        self.message_index: dict[str, int] = {}
        self.posted: dict[tuple[str, str, int, LanePair], list[int]] = {}
        """Messages that are posted together: those of one task through one channel."""

    def compile(self) -> Program:
        for edge in self.schedule.edges:
            source, _, target = edge.partition(">")
            if source not in self.home or target not in self.home:
                raise self._error(edge, "no row has one of its tasks; make the schedule again")
            if self.rank in (self.home[source][0], self.home[target][0]):
                self._add_edge(edge, source, target)
        for cell in (cell for row in self.rows for cell in row if cell.startswith(_POSTS)):
            self.posted.setdefault(self._channel(cell), []).append(self.message_index[cell[5:-1]])
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
        ends = Edge(_task_name(source), _task_name(target))
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
            return task.name.kind, index, task
        text, _, inner = cell[:-1].partition("(")
        verb = Verb(text)
        if verb is Verb.FREE:
            return verb, -1, _task_name(inner)
        if verb is Verb.REDUCE:
            return verb, -1, int(inner)
        index = self.message_index[inner]
        if cell.startswith(_POSTS):
            together = self.posted[self._channel(cell)]
            return verb, index, tuple(together) if index == together[0] else ()
        source, _, target = inner.partition(">")
        arrives = (_task_name(source), self.index[target]) if verb is Verb.WAIT_RECV else None
        return verb, index, arrives

    def _channel(self, cell: str) -> tuple[str, str, int, LanePair]:
        """Returns the verb and the source of a message that is posted, and its channel."""
        verb, _, edge = cell[:-1].partition("(")
        message = self.messages[self.message_index[edge]]
        return verb, edge.partition(">")[0], message.peer, message.lanes

    def _error(self, cell: str, problem: str) -> InvalidScheduleError:
        return InvalidScheduleError(f"rank {self.rank}, {cell}: {problem}", grid=self.schedule.text)


Span = tuple[str, int, int]
"""An action, its start and its end on ``time.monotonic_ns``; on a GPU, of its launch."""

_TASKS = (ActionKind.FORWARD, ActionKind.BACKWARD)
_POSTS = (f"{Verb.SEND}(", f"{Verb.RECEIVE}(")


class StepRun:
    """The actions of a rank in one step. Each lane runs its own in order, on any thread."""

    def __init__(self, program: Program, work: Work, transport: Transport) -> None:
        self.program = program
        self.failure: BaseException | None = None
        """The first error of this rank."""
        self.spans: list[Span] = []
        self._work, self._transport = work, transport
        self._inbox: list[dict[Any, Any]] = [dict.fromkeys(task.sources) for task in program.tasks]
        self._leaving: list[Tensors] = [()] * len(program.messages)
        self._pending: list[Pending | None] = [None] * len(program.messages)
        self._ended = {index: threading.Event() for task in program.tasks for index in task.after}
        self._failing = threading.Lock()

    def act(self, lane: int, at: int) -> None:
        """Runs an action of a lane; an error ends the other ranks and the lanes that wait."""
        cell, action, start_ns = self.program.cells[lane][at], self.program.rows[lane][at], time.monotonic_ns()
        try:
            self._act(cell, *action)
        except BaseException as error:
            self.fail(cell, error)
            raise
        end_ns, cells = time.monotonic_ns(), [cell]
        if cell.startswith(_POSTS):  # each message of a group has an equal part
            cells = [f"{action[0]}({self.program.messages[index].name})" for index in action[2]]
        part_ns = (end_ns - start_ns) // max(1, len(cells))
        self.spans += [(each, start_ns + at * part_ns, start_ns + (at + 1) * part_ns) for at, each in enumerate(cells)]

    def await_lanes(self, index: int) -> None:
        """Waits for the tasks of other lanes that a task reads from; raises RankFailedError if a lane has failed."""
        for source in self.program.tasks[index].after:
            self._ended[source].wait()
            if self.failure is not None:
                raise RankFailedError(f"another lane of rank {self._transport.rank} has failed", ranks=())

    def received(self, index: int) -> Tensors:
        """Returns the inputs of a task so far; for an index of -1 nothing."""
        inbox = self._inbox[index].values() if index >= 0 else ()
        return tuple(tensor for tensors in inbox if tensors is not None for tensor in tensors)

    def fail(self, where: str, error: BaseException) -> None:
        """Ends the waits of the other lanes, and those of the other ranks unless one of them has failed."""
        with self._failing:
            is_first, self.failure = self.failure is None, self.failure or error
        if not is_first:
            return
        for event in self._ended.values():
            event.set()
        if not isinstance(error, RankFailedError):
            self._transport.abort(f"failed in {where}: {type(error).__name__}: {error}")

    def _act(self, cell: str, kind: ActionKind | Verb, index: int, what: Any) -> None:
        work, transport = self._work, self._transport
        if kind in _TASKS:
            inputs, self._inbox[index] = self._inbox[index], {}
            is_forward = kind is ActionKind.FORWARD
            with transport.progress.computing(cell, "forward" if is_forward else "backward"):
                outputs = work.forward(what, inputs) if is_forward else work.backward(what, inputs)
            for target, place, message in what.exits:
                tensors = outputs.get(target)
                if tensors is None:
                    raise ModuleContractError(f"{cell} made nothing for {target}; return tensors for every edge")
                if place >= 0:
                    self._inbox[place][what.name] = tensors
                else:
                    self._leaving[message] = tensors
            if index in self._ended:
                self._ended[index].set()
        elif kind in (Verb.SEND, Verb.RECEIVE):
            to_send = [self._leaving[each] if kind is Verb.SEND else None for each in what]
            posted = transport.post([self.program.messages[each] for each in what], to_send) if what else ()
            for each, pending in zip(what, posted, strict=True):
                self._pending[each] = pending
        elif kind is Verb.WAIT_SEND:
            self._await(index)
            self._leaving[index] = ()
        elif kind is Verb.WAIT_RECV:
            source, place = what
            self._inbox[place][source] = self._await(index)
        elif kind is Verb.FREE:
            work.free(what)
        else:
            assert kind is Verb.REDUCE
            with transport.progress.computing(cell, "reduce"):
                work.reduce(what)

    def _await(self, message: int) -> Tensors:
        pending, self._pending[message] = self._pending[message], None
        assert pending is not None
        return pending.wait()


class InTurn:
    """Runs all lanes on one thread, in an order that suits them all."""

    def run(self, step: StepRun) -> None:
        at = [0] * len(step.program.rows)
        for lane in step.program.turns:
            step.act(lane, at[lane])
            at[lane] += 1


class OnThreads:
    """Runs each lane on a thread of its own, pinned to its cores: one that waits does not hold the others up.

    A step in which one lane alone has something to do, such as one without images, runs on the calling thread, with all
    cores. So does one that torch modes of that thread watch, such as a counter of operators: they do not see others.
    """

    def __init__(self, lanes: Lanes, of_row: Sequence[Lane]) -> None:
        self._lanes, self._of_row = lanes, tuple(of_row)

    def run(self, step: StepRun) -> None:
        if _has_one_lane(step) or interception() is not None:
            InTurn().run(step)
            return
        state = ThreadState.capture()
        for number, lane in enumerate(self._of_row):
            lane.submit(partial(_walk, step, number, state))
        try:
            self._lanes.drain()
        except BaseException as error:  # such as KeyboardInterrupt: lanes must not go on without their caller
            step.fail("the wait for its lanes", error)
            self._lanes.drain()
        forget_cast_weights()
        if step.failure is not None:
            raise step.failure


def _has_one_lane(step: StepRun) -> bool:
    return sum(map(bool, step.program.rows)) < 2


def _walk(step: StepRun, lane: int, state: ThreadState) -> None:
    with Applied(state):
        for at, (kind, index, _) in enumerate(step.program.rows[lane]):
            if kind in _TASKS:
                step.await_lanes(index)
            step.act(lane, at)


class OnStreams:
    """Launches all lanes' actions from one thread, each on the stream of its lane; streams wait for events.

    Autograd runs a backward on the streams of its forward, so each task stays on its lane's SMs. A step in which one
    lane alone has something to do runs on the caller's stream, with all SMs. Not tried on GPUs.
    """

    def __init__(self, lanes: StreamLanes, of_row: Sequence[StreamLane]) -> None:
        self._lanes, self._of_row = lanes, tuple(of_row)

    def run(self, step: StepRun) -> None:
        """Launches all actions; the caller's stream then waits for them, and no thread does."""
        if _has_one_lane(step):
            InTurn().run(step)
            return
        for lane in self._of_row:
            lane.order_after_caller()
        at = [0] * len(self._of_row)
        tickets: dict[int, StreamTicket[None]] = {}
        try:
            for number in step.program.turns:
                self._launch(step, number, at[number], tickets)
                at[number] += 1
        finally:
            self._lanes.join()

    def _launch(self, step: StepRun, number: int, at: int, tickets: dict[int, StreamTicket[None]]) -> None:
        lane, (kind, index, _) = self._of_row[number], step.program.rows[number][at]
        if kind not in (*_TASKS, Verb.REDUCE):
            with lane.api.use_stream(lane.stream):
                step.act(number, at)
            return
        after = [tickets[source] for source in step.program.tasks[index].after] if index >= 0 else []
        for tensor in step.received(index) if after else ():
            lane.api.record_use(tensor, lane.stream)
        ticket = lane.launch(partial(step.act, number, at), after=after, behind_caller=False)
        if index >= 0:
            tickets[index] = ticket


LaunchMode = InTurn | OnThreads | OnStreams
"""Runs all actions of a step on a rank's lanes, and raises the first error of an action."""

MAX_PROGRAMS = 64
"""Most programs that an executor keeps."""


class Executor:
    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._programs: dict[tuple[str, str], Program] = {}

    def run(
        self, schedule: PipelineSchedule, work: Work, *, shapes: str = "", lanes: LaunchMode | None = None
    ) -> list[Span]:
        """Executes this rank's actions; all ranks call it with the same schedule.

        Args:
            schedule: The schedule of the step.
            work: Computes its tasks.
            shapes: Names what ``work.specs`` depends on beside the schedule, which steps of other shapes may share.
            lanes: Runs this rank's lanes; by default in turn on this thread.

        Raises:
            InvalidScheduleError: This rank's actions cannot be run.
            RankFailedError: Another rank has failed, or is gone.
        """
        run = StepRun(self._program(schedule, work, shapes), work, self.transport)
        self.transport.progress.calls += 1
        (lanes or InTurn()).run(run)
        self.transport.progress.step += 1
        return run.spans

    def _program(self, schedule: PipelineSchedule, work: Work, shapes: str) -> Program:
        key = schedule.hash, shapes
        if (known := self._programs.pop(key, None)) is not None:
            self._programs[key] = known  # the most recent one stands last
            return known
        try:
            size = 1 + max(schedule.rank_of, default=0)
            if size != self.transport.size:
                raise InvalidScheduleError(
                    f"the schedule is for {size} ranks, and there are {self.transport.size}; start {size}, or plan for "
                    f"{self.transport.size}"
                )
            program = _Compiler(schedule, self.transport.rank, work).compile()
        except BaseException as error:
            self.transport.abort(f"cannot run its schedule: {type(error).__name__}: {error}")
            raise
        self._programs[key] = program
        if len(self._programs) > MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program
