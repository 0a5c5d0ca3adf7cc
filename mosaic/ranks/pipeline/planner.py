"""The plans of a pipeline's steps: searched while the step before runs, known of steps like it, or planned at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mosaic.errors import InfeasibleError
from mosaic.hardware import Cluster, Link
from mosaic.pipelining.layers import AS_COUNTED, CountedMicrobatch, Microbatch
from mosaic.pipelining.next_step import NextStepPlanner, StepPlanning
from mosaic.pipelining.partition import Partition, Request
from mosaic.pipelining.plan import FittedTimes, PipelinePlan
from mosaic.pipelining.planner import (
    PlannedStep,
    PlannerOptions,
    SharedStep,
    plan_baseline,
    plan_shares,
    plan_step,
    shares_of,
)
from mosaic.pipelining.rank_hardware import Degrees
from mosaic.pipelining.schedule import PipelineSchedule, TaskName, forward_only
from mosaic.pipelining.task_graph import RankSpace, task_graph
from mosaic.pipelining.tasks import TaskGraph
from mosaic.ranks.world.world import World

_LOG = logging.getLogger("mosaic")

PLANNED = "planned"
"""Name of the plan that searches each step's order in one pipeline over all ranks, or in as many as were asked for."""
GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, in predictions."""
MAX_SCHEDULES = 256
"""Most steps of different shapes whose schedules are kept."""
PLANNING_SHARE = 0.05
"""Share of the last step's time for planning a step that was not announced."""


@dataclass(frozen=True, kw_only=True)
class StepPlanner:
    """Plans the steps of a pipeline on a grid of ranks."""

    name: str
    baseline: str = ""
    """One of ``BASELINES``; empty: each step is planned."""
    degrees: Degrees
    request: Request
    """Model, ranks of one pipeline, and the microbatches that its partition was made for."""
    space: RankSpace
    options: PlannerOptions
    partition: Partition
    """Layers of each rank of a pipeline."""
    predicted_ms: float = 0.0
    """A step of the request's microbatches, gradients' sums included; 0: not predicted."""

    @classmethod
    def make(
        cls,
        name: str,
        degrees: Degrees,
        request: Request,
        *,
        space: RankSpace,
        options: PlannerOptions,
        baseline: str = "",
    ) -> StepPlanner:
        """Makes a partition for the first replica's share of a step of the request's microbatches.

        Raises:
            InfeasibleError, ValueError: See ``plan_step`` and ``plan_baseline``.
        """
        request = replace(request, num_ranks=degrees.pipeline)
        shares = shares_of(request, request.microbatches, degrees.data)
        step = [request.microbatches[at] for at in shares[0]]
        if baseline:
            planned = plan_baseline(baseline, request, step, space=space)
        else:
            planned = plan_step(request, step, space=space, options=options)
        sum_ms = _sum_ms(planned.partition, request, degrees.data * degrees.context, space.network)
        return cls(
            name=name,
            baseline=baseline,
            degrees=degrees,
            request=request,
            space=space,
            options=options,
            partition=planned.partition,
            predicted_ms=planned.makespan_ns / 1e6 + sum_ms,
        )

    @property
    def saved(self) -> PipelinePlan:
        """The plan as plain data, for a later start."""
        return PipelinePlan(
            name=self.name,
            baseline=self.baseline,
            degrees=self.degrees,
            partition=self.partition,
            fitted=FittedTimes.of(self.request.model.modules, self.space.host),
        )

    @property
    def is_fitted(self) -> bool:
        """True if counted times were fitted to measured ones."""
        return any(fit != AS_COUNTED for fit in self.saved.fitted.modules.values())

    def tasks(self, step: Sequence[Microbatch], schedule: PipelineSchedule) -> TaskGraph:
        """Returns the tasks of a step, with the times and bytes of its schedule's strategies."""
        chosen = {TaskName.parse(text): layers for text, layers in schedule.strategies.items()}
        pairs = {(task.chunk, task.microbatch, task.piece): layers for task, layers in chosen.items()}
        strategies = pairs or schedule.strategy
        return task_graph(self.request.model, self.partition, step, self.space, strategies=strategies)

    def plan(self, step: Sequence[Microbatch], *, seconds: float = math.inf, share: float = 1.0) -> PlannedStep:
        """Plans a step with a share of the options' effort; ``seconds`` of the clock end it, if roll-outs do not."""
        if self.baseline:
            return plan_baseline(self.baseline, self.request, step, space=self.space)
        limits, method = self.options.limits.share(share), self.options.method
        if limits.rollouts is None or seconds == 0:
            limits = replace(limits, seconds=min(limits.seconds, seconds))
        is_natural = limits.is_counted_out or limits.seconds == 0
        options = replace(self.options, limits=limits, method="natural" if is_natural else method)
        return plan_step(self.request, step, space=self.space, options=options, partition=self.partition)

    def plan_shared(self, step: Sequence[Microbatch], *, seconds: float = math.inf) -> SharedStep:
        """Shares a step out over replicas, and plans each share; ``seconds`` for all together."""
        shares = shares_of(self.request, step, self.degrees.data)
        each = 1 / sum(map(bool, shares))
        return plan_shares(shares, step, lambda own: self.plan(own, seconds=each * seconds, share=each).schedule())

    def plan_forwards(self, step: Sequence[Microbatch]) -> SharedStep:
        """Plans the forwards of microbatches: at once, and whatever memory their backwards would take."""
        shared = replace(self, space=replace(self.space, limit_bytes=0)).plan_shared(step, seconds=0.0)
        return replace(shared, schedules=tuple(None if one is None else forward_only(one) for one in shared.schedules))


def _sum_ms(partition: Partition, request: Request, num_copies: int, network: Link | Cluster | None) -> float:
    """Returns the time of summing the most gradients of one rank over all that have them, overlapped by nothing."""
    if num_copies == 1 or network is None:
        return 0.0
    modules = {module.name: module for module in request.model.modules}
    trained = [0] * partition.num_ranks
    for chunk in partition.chunks:
        for part in chunk.parts:
            module = modules[part.module]
            own = (layer for layer in range(part.first, part.end) if module.trains[layer])
            trained[chunk.rank] += sum(module.num_parameters(layer, 1) for layer in own)
    return network.all_reduce_ms(GRADIENT_BYTES * max(trained), num_copies)


_Counted = Sequence[CountedMicrobatch]
_Known = dict[tuple[str, ...], SharedStep]


class StepSchedules:
    """Schedules of a pipeline's steps. Every rank makes the same calls, and rank 0 plans.

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
        """Returns the number of kinds of steps whose schedule is known."""
        return len(self._known)

    def of(self, number: int, counted: _Counted, *, last_s: float) -> SharedStep:
        """Returns the schedules of a step, announced or not.

        Args:
            number: Number of the step.
            counted: Its microbatches.
            last_s: Time of the step before; 0 for the first.
        """
        key = _key(counted)
        is_announced, self._announced = self._announced == number, -1
        schedules = None
        if self._world.rank == 0 and is_announced and self._ahead is not None:
            planned = self._ahead.take(number)
            schedules = planned.schedule if key == self._announced_key else None  # modes may have changed since
            if planned.error:
                self.failed_ahead += 1
                if self.failed_ahead == 1:
                    _LOG.warning("step %d could not be planned ahead: %s", number, planned.error)
        if is_announced:
            schedules = self._world.broadcast(schedules)
        if schedules is None and key in self._known:
            return self._known[key]
        if schedules is None:
            schedules = self._world.broadcast(self._planned_now(counted, last_s) if self._world.rank == 0 else None)
        assert schedules is not None
        return _remember(self._known, key, schedules)

    def announce(self, number: int, count: Callable[[], _Counted], *, last_s: float) -> None:
        """Starts the search for the next step's schedule in a process beside rank 0.

        Args:
            number: Number of the step.
            count: Counts its microbatches; called on rank 0.
            last_s: Time of the step before; 0 for the first.
        """
        planner = self._planner
        if planner.baseline:
            return
        self._announced = number
        if self._world.rank:
            return
        if self._ahead is None:
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
        schedules = self._world.broadcast(self._planner.plan_forwards(counted) if self._world.rank == 0 else None)
        assert schedules is not None
        return _remember(self._forwards, key, schedules)

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


def _key(counted: _Counted) -> tuple[str, ...]:
    return tuple(one.key for one in counted)


def _remember(known: _Known, key: tuple[str, ...], shared: SharedStep) -> SharedStep:
    if len(known) >= MAX_SCHEDULES:
        known.pop(next(iter(known)))
    known[key] = shared
    return shared
