"""A model on its ranks before it is settled how its steps are planned: what each way to do so is made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from mosaic.backends.base import Backend
from mosaic.errors import InfeasibleError, InvalidPlanError
from mosaic.pipelining.partition import Partition, Request
from mosaic.pipelining.plan import FittedTimes, PipelinePlan
from mosaic.pipelining.planner import PlannerOptions, SharedStep
from mosaic.pipelining.rank_hardware import Degrees
from mosaic.pipelining.task_graph import RankSpace
from mosaic.ranks.pipeline.chunk_work import Loss
from mosaic.ranks.pipeline.context.sequences import Sequences
from mosaic.ranks.pipeline.counting import CountedModel
from mosaic.ranks.pipeline.grid.rank_grid import RankGrids
from mosaic.ranks.pipeline.rank_lanes import check_lanes
from mosaic.ranks.pipeline.runner import PLANNED, PipelineRunner, StepPlanner
from mosaic.ranks.pipeline.tensor.slices import WeightSlices
from mosaic.ranks.world.world import World

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PipelineSetup:
    """What a trial needs, on every rank."""

    model: nn.Module
    """With the weights of all layers."""
    counted: CountedModel
    """As planning sees it."""
    request: Request
    """For planning."""
    space: RankSpace
    """For planning."""
    options: PlannerOptions
    """For planning."""
    loss: Loss
    """Of the model's output."""
    degrees: Degrees
    """The grid that is planned for."""
    is_free: bool
    """Whether there may be other numbers of replicas."""
    grids: RankGrids
    """For all ways."""
    slices: WeightSlices | None = None
    """Of weights that tensor ranks share."""
    sequences: Sequences | None = None
    """That context ranks share."""
    backend: Backend | None = None
    """What this rank runs on; None: it has no lanes."""
    partition: Partition | None = None
    """That was given: nothing is tried."""

    @property
    def world(self) -> World:
        """The ranks."""
        return self.grids.world

    def make(
        self,
        name: str,
        *,
        degrees: Degrees | None = None,
        baseline: str = "",
        options: PlannerOptions | None = None,
    ) -> StepPlanner | str:
        """Plans a way on rank 0 for all; returns why it cannot be where it cannot."""

        def plan() -> StepPlanner:
            planner = StepPlanner.make(
                name,
                degrees or self.degrees,
                self.request,
                space=self.space,
                options=options or self.options,
                baseline=baseline,
            )
            check_lanes(self.model, self.counted.split, planner.partition, planner.degrees)
            return planner

        return self._planned(plan)

    def plan_sample(self, planner: StepPlanner, *, seconds: float = math.inf) -> SharedStep | str:
        """Plans the sample's step on rank 0 for all; returns why it cannot be where it cannot."""
        return self._planned(lambda: planner.plan_shared(planner.request.microbatches, seconds=seconds))

    def with_replicas(self, count: int) -> Degrees:
        """Returns the grid of so many replicas."""
        places = self.degrees.data * self.degrees.pipeline
        return replace(self.degrees, data=count, pipeline=places // count)

    def planned(self) -> StepPlanner:
        """Plans each step.

        Raises:
            InfeasibleError: Nothing fits, on all ranks.
        """
        planner = self.make(PLANNED)
        if isinstance(planner, str):
            raise InfeasibleError("the model cannot be planned on these ranks", reasons=[planner])
        return planner

    def given(self, partition: Partition) -> StepPlanner:
        """Plans each step of a partition that was given."""
        return StepPlanner(
            name=PLANNED,
            degrees=self.degrees,
            request=self.request,
            space=self.space,
            options=self.options,
            partition=partition,
        )

    def kept(self, kept: PipelinePlan) -> StepPlanner:
        """Returns the way of an earlier start, planned with the times that were measured then."""
        then = self.with_times(kept.fitted)
        return StepPlanner(
            name=kept.name,
            baseline=kept.baseline,
            degrees=kept.degrees,
            request=replace(then.request, num_ranks=kept.degrees.pipeline),
            space=then.space,
            options=self.options,
            partition=kept.partition,
        )

    def with_times(self, fitted: FittedTimes) -> PipelineSetup:
        """Returns what is planned with what was measured."""
        request = replace(self.request, model=fitted.model(self.counted.model))
        return replace(self, request=request, space=replace(self.space, host=fitted.host))

    def runner(self, planner: StepPlanner, *, keeps_all: bool) -> PipelineRunner:
        """Returns what runs a way."""
        grid = self.grids.of(planner.degrees)
        return PipelineRunner(
            self.model,
            planner,
            self.counted,
            self.loss,
            grid=grid,
            slices=self.slices,
            backend=self.backend,
            keeps_all=keeps_all,
        )

    def cut(self, step: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns what the model is called with on this rank for a step's microbatches."""
        return list(step) if self.sequences is None else [self.sequences.cut(one) for one in step]

    def shapes(self, step: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Names the shapes of a step's microbatches."""
        return tuple(self.counted.microbatch(one).key for one in step)

    def drop_gradients(self) -> None:
        """Leaves none for the next step."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def _planned(self, plan: Callable[[], T]) -> T | str:
        found: T | str = ""
        if self.world.rank == 0:
            try:
                found = plan()
            except (InfeasibleError, InvalidPlanError, ValueError) as error:
                found = str(error)
        told: T | str = self.world.broadcast(found)
        return told
