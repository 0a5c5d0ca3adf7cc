"""Planning functions of ``NextStepPlanner`` for steps of one partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mosaic.pipelining.next_step import Search
from mosaic.pipelining.order.search import OrderLimits
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.planner import PlannerOptions, plan_step
from mosaic.pipelining.rank_space import RankSpace
from mosaic.pipelining.replicas import SharedStep, plan_shares, shares_of
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.pipelining.workload.microbatch import Microbatch


@dataclass(frozen=True, kw_only=True)
class StepPlanning:
    """Plans a step from its microbatches: the natural order within milliseconds, then a search."""

    request: Request
    """Model and ranks."""
    partition: Partition
    """Layers of each rank."""
    space: RankSpace = field(default_factory=RankSpace)
    """The ranks."""
    options: PlannerOptions = field(default_factory=PlannerOptions)
    """Options; their limits hold if the search has none."""

    def __call__(self, microbatches: Sequence[Microbatch], search: Search) -> PipelineSchedule:
        """Returns the best schedule at the end of the search.

        Raises:
            InfeasibleError, ValueError: See ``plan_step``.
        """
        search.offer(self.natural(microbatches))
        return self.searched(microbatches, search)

    def natural(self, microbatches: Sequence[Microbatch]) -> PipelineSchedule:
        """Returns the schedule of the natural order."""
        return self._plan(microbatches, OrderLimits(effort=0.0), "natural")

    def searched(self, microbatches: Sequence[Microbatch], search: Search, *, share: float = 1.0) -> PipelineSchedule:
        """Returns the best schedule of a search over a share of the remaining time."""
        left_s = search.seconds_left
        limits = replace(
            self.options.limits,
            seconds=self.options.limits.seconds if left_s is None else left_s,
            threads=search.num_threads,
            should_stop=search.should_stop,
        )
        return self._plan(microbatches, limits.share(share), self.options.method)

    def _plan(self, microbatches: Sequence[Microbatch], limits: OrderLimits, method: str) -> PipelineSchedule:
        options = replace(self.options, limits=limits, method=method)
        planned = plan_step(self.request, microbatches, space=self.space, options=options, partition=self.partition)
        return planned.schedule()


@dataclass(frozen=True, kw_only=True)
class SharedStepPlanning:
    """Plans a step on replicas of a pipeline: the natural order of all, then a search for each."""

    pipeline: StepPlanning
    """Planning of one replica."""
    num_replicas: int

    def __call__(self, microbatches: Sequence[Microbatch], search: Search) -> SharedStep:
        """Returns the best schedules at the end of the search.

        Raises:
            InfeasibleError, ValueError: See ``plan_step``.
        """
        shares = shares_of(self.pipeline.request, microbatches, self.num_replicas)
        search.offer(plan_shares(shares, microbatches, self.pipeline.natural))
        left = sum(map(bool, shares))

        def searched(share: Sequence[Microbatch]) -> PipelineSchedule:
            nonlocal left
            left -= 1
            return self.pipeline.searched(share, search, share=1 / (left + 1))

        return plan_shares(shares, microbatches, searched)
