"""Schedules of a pipeline's steps: searched while the step before runs, known of steps like it, or planned at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from mosaic.errors import InfeasibleError
from mosaic.pipelining.layers import CountedMicrobatch, Microbatch
from mosaic.pipelining.next_step import NextStepPlanner, StepPlanning
from mosaic.pipelining.planner import SharedStep
from mosaic.pipelining.schedule import forward_only
from mosaic.ranks.pipeline.runner import StepPlanner
from mosaic.ranks.world.world import World


def forwards_of(planner: StepPlanner, step: Sequence[Microbatch]) -> SharedStep:
    """Plans the forwards of microbatches: at once, and whatever memory their backwards would take."""
    free = replace(planner, space=replace(planner.space, limit_bytes=0))
    shared = free.plan_shared(step, seconds=0.0)
    return replace(shared, schedules=tuple(None if one is None else forward_only(one) for one in shared.schedules))


_LOG = logging.getLogger("mosaic")

MAX_SCHEDULES = 256
"""Steps of different shapes whose schedules are kept."""
PLANNING_SHARE = 0.05
"""Of the time of the last step, for a step that nobody announced."""

_Counted = Sequence[CountedMicrobatch]
_Known = dict[tuple[str, ...], SharedStep]


class StepSchedules:
    """Those of one way; every rank makes it and makes the same calls, and rank 0 plans.

    Args:
        way: How steps are planned.
        world: All ranks.

    Attributes:
        failed_ahead: Steps whose planning ahead failed, on rank 0.
    """

    def __init__(self, planner: StepPlanner, world: World) -> None:
        self._planner, self._world = planner, world
        self._known: _Known = {}
        self._forwards: _Known = {}
        self._ahead: NextStepPlanner | None = None
        self._announced, self._announced_key = -1, tuple[str, ...]()
        self.failed_ahead = 0

    def __len__(self) -> int:
        """Of how many kinds of steps the schedule is known."""
        return len(self._known)

    def of(self, number: int, counted: _Counted, *, last_s: float) -> SharedStep:
        """Returns the schedules of a step, which is the announced one or has not been announced.

        Args:
            number: Of the step.
            counted: Its microbatches.
            last_s: What the step before took; of the first step 0.
        """
        key = _key(counted)
        is_announced, self._announced = self._announced == number, -1
        found = None
        if self._world.rank == 0 and is_announced and self._ahead is not None:
            planned = self._ahead.take(number)
            found = planned.schedule if key == self._announced_key else None  # modes may have changed since
            self._note(number, planned.error)
        if is_announced:
            found = self._world.broadcast(found)
        if found is None and key in self._known:
            return self._known[key]
        if found is None:
            found = self._world.broadcast(self._planned_now(counted, last_s) if self._world.rank == 0 else None)
        assert found is not None
        return _kept(self._known, key, found)

    def announce(self, number: int, count: Callable[[], _Counted], *, last_s: float) -> None:
        """Has the schedule of the next step searched in a process beside rank 0.

        Args:
            number: Of the step.
            count: Counts its microbatches; called on rank 0.
            last_s: What the step before took; of the first step 0.
        """
        if self._planner.baseline:
            return
        self._announced = number
        if self._world.rank:
            return
        if self._ahead is None:
            planner = self._planner
            self._ahead = NextStepPlanner(
                StepPlanning(
                    request=planner.request,
                    partition=planner.partition,
                    space=planner.space,
                    options=planner.options,
                    num_replicas=planner.degrees.data,
                )
            )
        counted = count()
        self._announced_key = _key(counted)
        self._ahead.start(number, counted, step_s=last_s or None)

    def forwards(self, counted: _Counted) -> SharedStep:
        """Returns the schedules of forwards alone."""
        key = _key(counted)
        if key in self._forwards:
            return self._forwards[key]
        found = self._world.broadcast(forwards_of(self._planner, counted) if self._world.rank == 0 else None)
        assert found is not None
        return _kept(self._forwards, key, found)

    def close(self) -> None:
        """Ends the process beside rank 0."""
        if self._ahead is not None:
            self._ahead.close()

    def _planned_now(self, counted: _Counted, last_s: float) -> SharedStep:
        """Plans a step in a share of the last step's time; in all the time that is allowed, if it does not fit so."""
        if last_s:
            with suppress(InfeasibleError):
                return self._planner.plan_shared(counted, seconds=PLANNING_SHARE * last_s)
        return self._planner.plan_shared(counted)

    def _note(self, number: int, error: str) -> None:
        """Says once that planning ahead fails, and counts how often; such steps are planned when their turn comes."""
        if error:
            self.failed_ahead += 1
            if self.failed_ahead == 1:
                _LOG.warning("step %d could not be planned ahead: %s", number, error)


def _key(counted: _Counted) -> tuple[str, ...]:
    return tuple(one.key for one in counted)


def _kept(known: _Known, key: tuple[str, ...], shared: SharedStep) -> SharedStep:
    """Keeps a schedule, for which the oldest may have to go."""
    if len(known) >= MAX_SCHEDULES:
        known.pop(next(iter(known)))
    known[key] = shared
    return shared
