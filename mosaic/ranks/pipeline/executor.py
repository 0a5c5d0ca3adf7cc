"""Executes the actions of a schedule on one rank: tasks by the rank's work, messages by its transport.

A rank on which an action fails aborts the others, which end with an error that names it, the action and the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from mosaic.backends.base import Lane, Lanes
from mosaic.backends.streams.lanes import StreamLane, StreamLanes, StreamTicket
from mosaic.engine.calls.thread_state import ThreadState, forget_cast_weights, interception
from mosaic.errors import InvalidScheduleError, ModuleContractError, RankFailedError
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.ranks.pipeline.program import (
    BACKWARD,
    FORWARD,
    FREE,
    RECEIVE,
    REDUCE,
    SEND,
    WAIT_RECEIVE,
    WAIT_SEND,
    Program,
    Work,
    compile_program,
)
from mosaic.ranks.pipeline.transport import Pending, Tensors, Transport

Span = tuple[str, int, int]
"""An action, its start and its end on ``time.monotonic_ns``; on a GPU, of its launch."""

_COMPUTES = (FORWARD, BACKWARD, REDUCE)


class StepRun:
    """The actions of a rank in one step. Each lane runs its own in order, on any thread.

    Attributes:
        failure: The error that ended the step on this rank first.
        spans: Times of the actions, in the order of their ends.
    """

    def __init__(self, program: Program, work: Work, transport: Transport) -> None:
        self.program = program
        self.failure: BaseException | None = None
        self.spans: list[Span] = []
        self._work, self._transport = work, transport
        self._inbox: list[dict[Any, Any]] = [dict.fromkeys(task.sources) for task in program.tasks]
        self._leaving: list[Tensors] = [()] * len(program.messages)
        self._pending: list[Pending | None] = [None] * len(program.messages)
        self._ended = {index: threading.Event() for task in program.tasks for index in task.after}
        self._failing = threading.Lock()

    def act(self, lane: int, at: int) -> None:
        """Runs an action of a lane; an error ends the other ranks and the lanes that wait."""
        cell, start_ns = self.program.cells[lane][at], time.monotonic_ns()
        try:
            self._act(cell, *self.program.rows[lane][at])
        except BaseException as error:
            self.fail(cell, error)
            raise
        self.spans.append((cell, start_ns, time.monotonic_ns()))

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

    def _act(self, cell: str, code: int, index: int, what: Any) -> None:
        work, transport = self._work, self._transport
        if code in (FORWARD, BACKWARD):
            inputs, self._inbox[index] = self._inbox[index], {}
            is_forward = code == FORWARD
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
        elif code == SEND:
            self._pending[index] = transport.post_send(self.program.messages[index], self._leaving[index])
        elif code == WAIT_SEND:
            self._await(index)
            self._leaving[index] = ()
        elif code == RECEIVE:
            self._pending[index] = transport.post_receive(self.program.messages[index])
        elif code == WAIT_RECEIVE:
            source, place = what
            self._inbox[place][source] = self._await(index)
        elif code == FREE:
            work.free(what)
        else:
            assert code == REDUCE
            with transport.progress.computing(cell, "reduce"):
                work.reduce(what)

    def _await(self, message: int) -> Tensors:
        pending, self._pending[message] = self._pending[message], None
        assert pending is not None
        return pending.wait()


class LaunchMode(Protocol):
    """Runs the lanes of a rank."""

    def run(self, step: StepRun) -> None:
        """Runs all actions of a step; raises the first error of an action."""


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
    """Runs one lane on the present thread."""
    with state.applied():
        for at, (code, index, _) in enumerate(step.program.rows[lane]):
            if code in (FORWARD, BACKWARD):
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
        lane, (code, index, _) = self._of_row[number], step.program.rows[number][at]
        if code not in _COMPUTES:
            with lane.api.use_stream(lane.stream):
                step.act(number, at)
            return
        after = [tickets[source] for source in step.program.tasks[index].after] if index >= 0 else []
        for tensor in step.received(index) if after else ():
            lane.api.record_use(tensor, lane.stream)
        ticket = lane.launch(partial(step.act, number, at), after=after, behind_caller=False, timed=False)
        if index >= 0:
            tickets[index] = ticket


MAX_PROGRAMS = 64
"""Most programs that an executor keeps."""
MAX_NAMES = 100_000
"""Most parsed names of tasks that it keeps."""


class Executor:
    """Executes schedules on one rank."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._names: dict[str, TaskName] = {}
        self._programs: dict[tuple[str, str], Program] = {}

    def run(
        self, schedule: PipelineSchedule, work: Work, *, shapes: str = "", lanes: LaunchMode | None = None
    ) -> list[Span]:
        """Executes this rank's actions; all ranks call it with the same schedule.

        Args:
            schedule: The schedule of the step.
            work: Computes its tasks.
            shapes: Names what ``work.specs`` depends on beside the schedule: steps of other shapes may have one
                schedule, and messages are planned once for both together.
            lanes: Runs this rank's lanes; by default in turn on this thread.

        Returns:
            Times of this rank's actions.

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
        if len(self._names) > MAX_NAMES:
            self._names.clear()
        try:
            size = 1 + max(schedule.rank_of, default=0)
            if size != self.transport.size:
                raise InvalidScheduleError(
                    f"the schedule is for {size} ranks, and there are {self.transport.size}; start {size}, or plan for "
                    f"{self.transport.size}"
                )
            program = compile_program(schedule, self.transport.rank, work, names=self._names)
        except BaseException as error:
            self.transport.abort(f"cannot run its schedule: {type(error).__name__}: {error}")
            raise
        self._programs[key] = program
        if len(self._programs) > MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program
