"""Executes a schedule on one rank: its actions one by one, each by the work or the transport.

Before the first step of each kind (schedule and shapes) all ranks compare the schedule's hash, the model's split and
what messages carry. A rank on which an action fails tells the others, which end with an error that names it, the action
and the reason.
"""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, Protocol

from mosaic.backends.base import Lane, Lanes
from mosaic.backends.streams.lanes import StreamLane, StreamLanes, StreamTicket
from mosaic.engine.calls.thread_state import ThreadState, forget_cast_weights, interception
from mosaic.errors import InvalidScheduleError, ModuleContractError, RankFailedError
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.ranks.pipeline.executing.program import (
    BACKWARD,
    FORWARD,
    FREE,
    GOT,
    RECEIVE,
    REDUCE,
    SEND,
    SENT,
    WEIGHTS,
    Exit,
    Program,
    Work,
    program_of,
)
from mosaic.ranks.pipeline.transports.transport import Handle, Tensors, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTimes:
    """When the actions of one lane ran in a step, on ``time.monotonic_ns``; on a GPU, when they were launched."""

    cells: tuple[str, ...]
    """The actions, in order."""
    start_ns: array[int] = field(default_factory=lambda: array("q"))
    """Of each."""
    end_ns: array[int] = field(default_factory=lambda: array("q"))
    """Of each that has ended."""


class StepRun:
    """The actions of a rank in one step. Each lane does its own in order, on whichever thread.

    Args:
        program: What is done.
        work: What its tasks compute.
        transport: How it reaches the others.
        times: For each lane where to record when its actions ran; None: nowhere.
    """

    def __init__(
        self, program: Program, work: Work, transport: Transport, times: tuple[ActionTimes, ...] | None
    ) -> None:
        self.program = program
        self.failure: BaseException | None = None
        """What ended the step on this rank first."""
        self._work, self._transport, self._times = work, transport, times
        self._inbox: list[dict[Any, Any]] = [dict.fromkeys(names) for names in program.inputs]
        self._leaving: list[Tensors] = [()] * len(program.messages)
        self._handles: list[Handle | None] = [None] * len(program.messages)
        self._made = {place: threading.Event() for places in program.after.values() for place in places}
        self._failing = threading.Lock()

    def do(self, lane: int, at: int) -> None:
        """Does an action of a lane.

        Raises:
            BaseException: Whatever it raised; the other ranks, and lanes that wait, end then.
        """
        times = None if self._times is None else self._times[lane]
        if times is not None:
            times.start_ns.append(time.monotonic_ns())
        cell = self.program.cells[lane][at]
        try:
            self._act(cell, *self.program.rows[lane][at])
        except BaseException as error:
            self.fail(cell, error)
            raise
        if times is not None:
            times.end_ns.append(time.monotonic_ns())

    def await_others(self, place: int) -> None:
        """Waits until other lanes have made what a task takes of them.

        Raises:
            RankFailedError: A lane has failed meanwhile.
        """
        for source in self.program.after.get(place, ()):
            self._made[source].wait()
            if self.failure is not None:
                raise RankFailedError(f"another lane of rank {self._transport.rank} has failed", ranks=())

    def given(self, place: int) -> Tensors:
        """Returns what a task has been given so far; for a place of -1 nothing."""
        found = self._inbox[place].values() if place >= 0 else ()
        return tuple(tensor for tensors in found if tensors is not None for tensor in tensors)

    def fail(self, where: str, error: BaseException) -> None:
        """Ends the waits of the other lanes, and those of the other ranks unless one of them has failed."""
        with self._failing:
            is_first, self.failure = self.failure is None, self.failure or error
        if not is_first:
            return
        for event in self._made.values():
            event.set()
        if not isinstance(error, RankFailedError):
            self._transport.abort(f"failed in {where}: {type(error).__name__}: {error}")

    def _act(self, cell: str, code: int, place: int, what: Any, exits: tuple[Exit, ...]) -> None:
        work, progress = self._work, self._transport.progress
        if code == FORWARD:
            with progress.computing(cell, "forward"):
                made = work.forward(what, self._taken(place))
            self._hand_out(what, made if isinstance(made, Mapping) else None, made, exits)
            self._note_made(place)
        elif code == BACKWARD:
            with progress.computing(cell, "backward"):
                made = work.backward(what, self._taken(place))
            self._hand_out(what, made, (), exits)
            self._note_made(place)
        elif code == SEND:
            self._handles[place] = self._transport.post_send(self.program.messages[place], self._leaving[place])
        elif code == SENT:
            self._awaited(place)
            self._leaving[place] = ()
        elif code == RECEIVE:
            self._handles[place] = self._transport.post_receive(self.program.messages[place])
        elif code == GOT:
            self._inbox[exits[0][1]][exits[0][0]] = self._awaited(place)
        elif code == WEIGHTS:
            with progress.computing(cell, "backward"):
                work.weights(what)
            self._note_made(place)
        elif code == FREE:
            work.free(what)
        else:
            with progress.computing(cell, "reduce"):
                work.reduce(what)

    def _note_made(self, place: int) -> None:
        event = self._made.get(place)
        if event is not None:
            event.set()

    def _taken(self, place: int) -> dict[Any, Any]:
        """Takes what a task is given out of its inbox."""
        given, self._inbox[place] = self._inbox[place], {}
        return given

    def _awaited(self, place: int) -> Tensors:
        """Waits for one end of a message, and lets go of it."""
        handle, self._handles[place] = self._handles[place], None
        assert handle is not None
        return handle.wait()

    def _hand_out(
        self, task: Any, by_target: Mapping[Any, Tensors] | None, for_all: Any, exits: tuple[Exit, ...]
    ) -> None:
        """Hands what a task made to tasks of this rank, and keeps what messages take."""
        for target, place, message in exits:
            tensors = for_all if by_target is None else by_target.get(target)
            if tensors is None:
                raise ModuleContractError(f"{task} made nothing for {target}; hand out something for every edge")
            if place >= 0:
                self._inbox[place][task] = tensors
            else:
                self._leaving[message] = tensors


_COMPUTES = (FORWARD, BACKWARD, WEIGHTS, REDUCE)


class LaunchMode(Protocol):
    """A way for the lanes of a rank to do their actions."""

    def go(self, run: StepRun) -> None:
        """Does all actions of a step.

        Raises:
            BaseException: The first thing that an action raised.
        """


class InTurn:
    """One thread does what all lanes do, in an order that suits them all."""

    def go(self, run: StepRun) -> None:
        """Does all actions; see ``LaunchMode``."""
        at = [0] * len(run.program.rows)
        for lane in run.program.order:
            run.do(lane, at[lane])
            at[lane] += 1


class OnThreads:
    """Each lane on a thread of its own, pinned to its cores: one that waits does not hold the others up.

    A step in which one lane alone has something to do, such as one without images, runs on the calling thread, with all
    cores. So does one that torch modes of that thread watch, such as a counter of operators: they do not see others.

    Args:
        lanes: Open lanes.
        of_row: For each row of the rank its lane.
    """

    def __init__(self, lanes: Lanes, of_row: Sequence[Lane]) -> None:
        self._lanes, self._of_row = lanes, tuple(of_row)

    def go(self, run: StepRun) -> None:
        """Does all actions; see ``LaunchMode``."""
        if _has_one_lane(run) or interception() is not None:
            InTurn().go(run)
            return
        state = ThreadState.capture()
        for number, lane in enumerate(self._of_row):
            lane.submit(partial(_walk, run, number, state))
        try:
            self._lanes.drain()
        except BaseException as error:  # such as KeyboardInterrupt: lanes must not go on without their caller
            run.fail("the wait for its lanes", error)
            self._lanes.drain()
        forget_cast_weights()
        if run.failure is not None:
            raise run.failure


def _has_one_lane(run: StepRun) -> bool:
    return sum(map(bool, run.program.rows)) < 2


def _walk(run: StepRun, lane: int, state: ThreadState) -> None:
    """Does what one lane does, on the present thread."""
    with state.applied():
        for at, (code, place, _, _) in enumerate(run.program.rows[lane]):
            if code in _COMPUTES and place in run.program.after:
                run.await_others(place)
            run.do(lane, at)


class OnStreams:
    """One thread launches all lanes' actions, each on the stream of its lane; streams wait for each other by events.

    Autograd runs a backward on the streams of its forward, so each task stays on its lane's SMs. A step in which one
    lane alone has something to do runs on the caller's stream, with all SMs. Not tried on GPUs.

    Args:
        lanes: Open lanes.
        of_row: For each row of the rank its lane.
    """

    def __init__(self, lanes: StreamLanes, of_row: Sequence[StreamLane]) -> None:
        self._lanes, self._of_row = lanes, tuple(of_row)

    def go(self, run: StepRun) -> None:
        """Launches all actions; see ``LaunchMode``. The caller's stream then waits for them, and no thread does."""
        if _has_one_lane(run):
            InTurn().go(run)
            return
        for lane in self._of_row:
            lane.order_after_caller()
        at = [0] * len(self._of_row)
        made: dict[int, StreamTicket[None]] = {}
        try:
            for number in run.program.order:
                self._launch(run, number, at[number], made)
                at[number] += 1
        finally:
            self._lanes.join()

    def _launch(self, run: StepRun, number: int, at: int, made: dict[int, StreamTicket[None]]) -> None:
        lane, (code, place, _, _) = self._of_row[number], run.program.rows[number][at]
        if code not in _COMPUTES:
            with lane.api.use_stream(lane.stream):
                run.do(number, at)
            return
        after = [made[one] for one in run.program.after.get(place, ())]
        for tensor in run.given(place) if after else ():
            lane.api.record_use(tensor, lane.stream)
        ticket = lane.launch(partial(run.do, number, at), after=after, behind_caller=False, timed=False)
        if place >= 0:
            made[place] = ticket


MAX_PROGRAMS = 64
"""Schedules that an executor keeps ready."""
MAX_NAMES = 100_000
"""Tasks whose names it keeps."""


class Executor:
    """Executes schedules on one rank.

    Args:
        transport: How it reaches the others.
        split: Names the model and its split into chunks.
    """

    def __init__(self, transport: Transport, *, split: str = "") -> None:
        self.transport = transport
        self.split = split
        self._names: dict[str, TaskName] = {}
        self._programs: dict[tuple[str, str], Program] = {}

    def run(
        self,
        schedule: PipelineSchedule,
        work: Work,
        *,
        shapes: str = "",
        is_timed: bool = False,
        lanes: LaunchMode | None = None,
    ) -> ActionTimes | None:
        """Executes this rank's actions; all ranks call it with the same schedule.

        Args:
            schedule: What is executed.
            work: What its tasks compute.
            shapes: Names what ``work.specs`` depends on beside the schedule and the split: steps of other shapes may
                have one schedule, and what messages carry is worked out once for both together.
            is_timed: Whether to record when each action ran.
            lanes: How this rank's lanes do their actions; by default in turn on this thread.

        Returns:
            When each action ran, lane after lane, if that is asked for.

        Raises:
            InvalidScheduleError: Ranks have other schedules, splits or specs, or this rank's actions cannot be run.
            RankFailedError: Another rank has failed, or is gone.
        """
        program = self._agreed(schedule, work, shapes)
        times = tuple(ActionTimes(cells=cells) for cells in program.cells) if is_timed else None
        progress = self.transport.progress
        progress.calls += 1
        (lanes or InTurn()).go(StepRun(program, work, self.transport, times))
        progress.step += 1
        return None if times is None else _joined(times)

    def _agreed(self, schedule: PipelineSchedule, work: Work, shapes: str) -> Program:
        """Returns the program of a schedule that all ranks have; they compare it the first time."""
        key = schedule.hash, shapes
        if (known := self._programs.pop(key, None)) is not None:
            self._programs[key] = known  # the last that was used stands last
            return known
        error: Exception | None = None
        try:
            program, carried = self._made(schedule, work)
            mine = ["", schedule.hash, self.split, *(f"{peer} {digest}" for peer, digest in carried.items())]
        except Exception as failure:  # of any kind: all ranks have to hear of it
            error = failure
            mine = [f"{type(error).__name__}: {error}", "", ""]
        told = [tuple(json.loads(each)) for each in self.transport.tell(json.dumps(mine))]
        if error is not None:
            raise error
        _check_alike(told)
        self._programs[key] = program
        if len(self._programs) > MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program

    def _made(self, schedule: PipelineSchedule, work: Work) -> tuple[Program, dict[int, str]]:
        size = 1 + max(schedule.rank_of, default=0)
        if size != self.transport.size:
            raise InvalidScheduleError(
                f"the schedule is for {size} ranks, and there are {self.transport.size}; start {size}, or plan for "
                f"{self.transport.size}"
            )
        if len(self._names) > MAX_NAMES:
            self._names.clear()
        program = program_of(schedule, self.transport.rank, work, names=self._names)
        return program, {peer: sha256(text.encode()).hexdigest() for peer, text in program.carried.items()}


def _joined(times: tuple[ActionTimes, ...]) -> ActionTimes:
    """Returns the times of all lanes of a rank, one lane after the other."""
    if len(times) == 1:
        return times[0]
    whole = ActionTimes(cells=tuple(cell for one in times for cell in one.cells))
    for one in times:
        whole.start_ns.extend(one.start_ns)
        whole.end_ns.extend(one.end_ns)
    return whole


def _check_alike(told: Sequence[tuple[str, ...]]) -> None:
    """Raises on every rank where one cannot run its schedule, or ranks do not fit together."""
    failed = next((rank for rank, each in enumerate(told) if each[0]), None)
    if failed is not None:
        raise RankFailedError(f"rank {failed} cannot run its schedule: {told[failed][0]}", ranks=(failed,))
    for what, index in (("schedule", 1), ("split of the model", 2)):
        names = [each[index] for each in told]
        others = "; ".join(f"rank {rank} has {name!r}" for rank, name in enumerate(names) if name != names[0])
        if others:
            raise InvalidScheduleError(
                f"the ranks have not the same {what}: {others}, and rank 0 has {names[0]!r}; give all of them the same"
            )
    digests = [dict(line.split(" ") for line in each[3:]) for each in told]
    for rank, own in enumerate(digests):
        for peer, digest in own.items():
            if digests[int(peer)].get(str(rank)) != digest:
                raise InvalidScheduleError(
                    f"rank {rank} and rank {peer} know other shapes or types of what they send each other; give all "
                    "ranks the metadata of the same microbatches"
                )
