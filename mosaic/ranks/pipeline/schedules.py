"""The schedules of a pipeline's steps: searched during the step before, known of steps like it, or planned at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from mosaic.errors import InfeasibleError
from mosaic.pipelining.layers import CountedMicrobatch
from mosaic.pipelining.next_step import NextStepPlanner
from mosaic.pipelining.plan import StepPlanner
from mosaic.pipelining.planner import SharedStep
from mosaic.ranks.world.world import World

_LOG = logging.getLogger("mosaic")

MAX_SCHEDULES = 256
"""Most steps of different shapes whose schedules are kept."""
PLANNING_SHARE = 0.05
"""Share of the last step's time for planning a step that was not announced."""

_Counted = Sequence[CountedMicrobatch]
_Key = tuple[str, ...]


class StepSchedules:
    """Schedules of a pipeline's steps. Every rank makes the same calls, and rank 0 plans.

    Attributes:
        failed_ahead: Steps whose planning ahead failed, on rank 0.
    """

    def __init__(self, planner: StepPlanner, world: World) -> None:
        self._planner, self._world = planner, world
        self._known: dict[_Key, SharedStep] = {}
        self._ahead: NextStepPlanner | None = None
        self._announced, self._announced_key = -1, _Key()
        self.failed_ahead = 0

    def __len__(self) -> int:
        return len(self._known)

    def of(self, number: int, counted: _Counted, *, last_s: float) -> SharedStep:
        key = _key(counted)
        is_announced, self._announced = self._announced == number, -1
        schedules = None
        if self._world.rank == 0 and is_announced and self._ahead is not None:
            schedules, error = self._ahead.take(number)
            schedules = schedules if key == self._announced_key else None  # modes may have changed since
            if error:
                self.failed_ahead += 1
                if self.failed_ahead == 1:
                    _LOG.warning("step %d could not be planned ahead: %s", number, error)
        if is_announced and (schedules := self._world.broadcast(schedules)) is not None:
            self._known[key] = schedules
        return self._planned(key, lambda: self._plan_now(counted, last_s))

    def announce(self, number: int, count: Callable[[], _Counted], *, last_s: float) -> None:
        """Starts the search for the next step's schedule in a process beside rank 0."""
        if self._planner.plan.baseline:
            return
        self._announced = number
        if self._world.rank:
            return
        if self._ahead is None:
            self._ahead = NextStepPlanner(self._planner)
        counted = count()
        self._announced_key = _key(counted)
        self._ahead.start(number, counted, step_s=last_s or None)

    def forwards(self, counted: _Counted) -> SharedStep:
        return self._planned(("forwards", *_key(counted)), lambda: self._planner.plan_forwards(counted))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def _planned(self, key: _Key, plan: Callable[[], SharedStep]) -> SharedStep:
        """Returns the known schedules of a kind of step, or has rank 0 plan it for all."""
        if key not in self._known:
            self._known[key] = self._world.broadcast(plan() if self._world.rank == 0 else None)
        if len(self._known) > MAX_SCHEDULES:
            del self._known[next(iter(self._known))]
        return self._known[key]

    def _plan_now(self, counted: _Counted, last_s: float) -> SharedStep:
        """Plans a step in a share of the last step's time; in all the time that is allowed, if it does not fit so."""
        if last_s:
            with suppress(InfeasibleError):
                return self._planner.plan_step(counted, seconds=PLANNING_SHARE * last_s)
        return self._planner.plan_step(counted)


def _key(counted: _Counted) -> _Key:
    return tuple(microbatch.key for microbatch in counted)
