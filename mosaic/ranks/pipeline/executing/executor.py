"""Executes a schedule on one rank: its actions one by one, each by the work or the transport.

Before the first action all ranks compare the schedule's hash, the model's split and what messages carry. A rank on
which an action fails tells the others, which end with an error that names it, the action and the reason.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from mosaic.errors import InvalidScheduleError, ModuleContractError, RankFailedError
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.schedule import PipelineSchedule
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
    program_of,
)
from mosaic.ranks.pipeline.executing.work import Work
from mosaic.ranks.pipeline.transports.transport import Handle, Tensors, Transport

MAX_PROGRAMS = 64
"""Schedules that an executor keeps ready."""
MAX_NAMES = 100_000
"""Tasks whose names it keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTimes:
    """When each action of one step ran, on ``time.monotonic_ns``; on a GPU, when it was launched."""

    cells: tuple[str, ...]
    """The actions, in order."""
    start_ns: array[int] = field(default_factory=lambda: array("q"))
    """Of each."""
    end_ns: array[int] = field(default_factory=lambda: array("q"))
    """Of each that has ended."""


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
        self._programs: dict[tuple[str, str], tuple[Program, dict[int, str]]] = {}

    def run(
        self, schedule: PipelineSchedule, work: Work, *, shapes: str = "", is_timed: bool = False
    ) -> ActionTimes | None:
        """Executes this rank's actions; all ranks call it with the same schedule.

        Args:
            schedule: What is executed.
            work: What its tasks compute.
            shapes: Names what ``work.specs`` depends on beside the schedule and the split: steps of other shapes may
                have one schedule, and what messages carry is worked out once for both together.
            is_timed: Whether to record when each action ran.

        Returns:
            When each action ran, if that is asked for.

        Raises:
            InvalidScheduleError: Ranks have other schedules, splits or specs, or this rank's actions cannot be run.
            RankFailedError: Another rank has failed, or is gone.
        """
        program = self._agreed(schedule, work, shapes)
        times = ActionTimes(cells=program.cells) if is_timed else None
        progress = self.transport.progress
        progress.calls += 1
        run = _Run(program, work, self.transport)
        try:
            run.go(times)
        except RankFailedError:
            raise
        except BaseException as error:
            self.transport.abort(f"failed in {program.cells[run.at]}: {type(error).__name__}: {error}")
            raise
        progress.step += 1
        return times

    def _agreed(self, schedule: PipelineSchedule, work: Work, shapes: str) -> Program:
        """Returns the program of a schedule that all ranks have."""
        error: Exception | None = None
        try:
            program, carried = self._ready(schedule, work, shapes)
            mine = ["", schedule.hash, self.split, *(f"{peer} {digest}" for peer, digest in carried.items())]
        except Exception as failure:  # of any kind: all ranks have to hear of it
            error = failure
            mine = [f"{type(error).__name__}: {error}", "", ""]
        told = [tuple(json.loads(each)) for each in self.transport.tell(json.dumps(mine))]
        if error is not None:
            raise error
        _check_alike(told)
        return program

    def _ready(self, schedule: PipelineSchedule, work: Work, shapes: str) -> tuple[Program, dict[int, str]]:
        key = schedule.hash, shapes
        ready = self._programs.pop(key, None)
        if ready is None:
            size = 1 + max(schedule.rank_of, default=0)
            if size != self.transport.size:
                raise InvalidScheduleError(
                    f"the schedule is for {size} ranks, and there are {self.transport.size}; start {size}, or plan for "
                    f"{self.transport.size}"
                )
            program = program_of(schedule, self.transport.rank, work, names=self._names)
            carried = {peer: sha256(text.encode()).hexdigest() for peer, text in program.carried.items()}
            ready = program, carried
        self._programs[key] = ready  # the last that was used stands last
        if len(self._programs) > MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        if len(self._names) > MAX_NAMES:
            self._names.clear()
        return ready


class _Run:
    """One step under way."""

    def __init__(self, program: Program, work: Work, transport: Transport) -> None:
        self.at = 0
        self._program, self._work, self._transport = program, work, transport
        self._inbox: list[dict[Any, Any]] = [dict.fromkeys(names) for names in program.inputs]
        self._leaving: list[Tensors] = [()] * len(program.messages)
        self._handles: list[Handle | None] = [None] * len(program.messages)

    def go(self, times: ActionTimes | None) -> None:
        """Walks the actions."""
        work, transport, progress = self._work, self._transport, self._transport.progress
        messages, leaving, handles = self._program.messages, self._leaving, self._handles
        cells, now = self._program.cells, time.monotonic_ns
        for at, (code, place, what, exits) in enumerate(self._program.actions):
            self.at = at
            if times is not None:
                times.start_ns.append(now())
            if code == FORWARD:
                with progress.computing(cells[at], "forward"):
                    made = work.forward(what, self._taken(place))
                self._hand_out(what, made if isinstance(made, Mapping) else None, made, exits)
            elif code == BACKWARD:
                with progress.computing(cells[at], "backward"):
                    made = work.backward(what, self._taken(place))
                self._hand_out(what, made, (), exits)
            elif code == SEND:
                handles[place] = transport.post_send(messages[place], leaving[place])
            elif code == SENT:
                self._awaited(place)
                leaving[place] = ()
            elif code == RECEIVE:
                handles[place] = transport.post_receive(messages[place])
            elif code == GOT:
                self._inbox[exits[0][1]][exits[0][0]] = self._awaited(place)
            elif code == WEIGHTS:
                with progress.computing(cells[at], "backward"):
                    work.weights(what)
            elif code == FREE:
                work.free(what)
            else:
                with progress.computing(cells[at], "reduce"):
                    work.reduce(what)
            if times is not None:
                times.end_ns.append(now())

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
