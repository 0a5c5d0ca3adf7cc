"""One step under way on one rank: its actions, what they have made and not yet handed on, and what ended it."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mosaic.errors import ModuleContractError, RankFailedError
from mosaic.ranks.pipeline.executing.program import (
    BACKWARD,
    FORWARD,
    FREE,
    GOT,
    RECEIVE,
    SEND,
    SENT,
    WEIGHTS,
    Exit,
    Program,
)
from mosaic.ranks.pipeline.executing.work import Work
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
