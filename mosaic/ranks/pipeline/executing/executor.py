"""Executes a schedule on one rank: its actions one by one, each by the work or the transport.

Before the first step of each kind (schedule and shapes) all ranks compare the schedule's hash, the model's split and
what messages carry. A rank on which an action fails tells the others, which end with an error that names it, the action
and the reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256

from mosaic.errors import InvalidScheduleError, RankFailedError
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.ranks.pipeline.executing.lane_ways import InTurn, LaneWay
from mosaic.ranks.pipeline.executing.program import Program, program_of
from mosaic.ranks.pipeline.executing.step_run import ActionTimes, StepRun
from mosaic.ranks.pipeline.executing.work import Work
from mosaic.ranks.pipeline.transports.transport import Transport

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
        lanes: LaneWay | None = None,
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
