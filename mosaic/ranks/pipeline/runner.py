"""Plans and runs a model's steps in a pipeline: each step by a search, or as a baseline does; all on one executor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mosaic.backends.base import Backend
from mosaic.errors import RankFailedError
from mosaic.hardware import Cluster, Link
from mosaic.parts.parted_model import PartedModel
from mosaic.pipelining.layers import AS_COUNTED, Microbatch
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
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.pipelining.task_graph import RankSpace, task_graph
from mosaic.pipelining.tasks import TaskGraph
from mosaic.ranks.pipeline.chunk_work import ChunkWork, Loss, Scale
from mosaic.ranks.pipeline.context.sequences import SharedItems
from mosaic.ranks.pipeline.counting import CountedModel
from mosaic.ranks.pipeline.executing.executor import ActionTimes, InTurn, LaunchMode
from mosaic.ranks.pipeline.grid.gradient_sums import GradientSums
from mosaic.ranks.pipeline.grid.rank_grid import RankGrid
from mosaic.ranks.pipeline.random_numbers import DrawnNumbers
from mosaic.ranks.pipeline.rank_lanes import check_lanes, lane_pairs, open_lanes
from mosaic.ranks.pipeline.step_data import StepData
from mosaic.ranks.pipeline.tensor.slices import WeightSlices

PLANNED = "planned"
"""Name of the way that plans each step in one pipeline over all ranks, or in as many as were asked for."""
GRADIENT_BYTES = 4
"""Of a parameter, in predictions."""


@dataclass(frozen=True, kw_only=True)
class StepPlanner:
    """Plans the steps of a pipeline on a grid of ranks."""

    name: str
    """As people read it."""
    baseline: str = ""
    """One of ``BASELINES``; empty: each step is planned."""
    degrees: Degrees
    """The grid: replicas of a pipeline, whose places may share layers."""
    request: Request
    """Model, ranks of one pipeline, and the microbatches that its partition was made for."""
    space: RankSpace
    """What ranks are."""
    options: PlannerOptions
    """Of what is planned."""
    partition: Partition
    """Where layers are in each pipeline."""
    predicted_ms: float = 0.0
    """A step of the request's microbatches, gradients' sums included; 0: nobody predicted it."""

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
        """Plans where layers are, for the first replica's share of a step of the request's microbatches.

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
        """The plan of a pipeline as plain data, for a later start."""
        return PipelinePlan(
            name=self.name,
            baseline=self.baseline,
            degrees=self.degrees,
            partition=self.partition,
            fitted=FittedTimes.of(self.request.model.modules, self.space.host),
        )

    @property
    def is_fitted(self) -> bool:
        """Whether counted times were fitted to measured ones."""
        return any(fit != AS_COUNTED for fit in self.saved.fitted.modules.values())

    def tasks(self, step: Sequence[Microbatch], schedule: PipelineSchedule) -> TaskGraph:
        """Returns the tasks of a step, with the times and bytes of its schedule's strategies."""
        chosen = {TaskName.parse(text): layers for text, layers in schedule.strategies.items()}
        pairs = {(task.chunk, task.microbatch, task.piece): layers for task, layers in chosen.items()}
        return task_graph(
            self.request.model,
            self.partition,
            step,
            self.space,
            strategies=pairs or schedule.strategy,
            weights_apart=any("W" in cell for row in schedule.rows for cell in row if cell[0].isdigit()),
        )

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


def _sum_ms(partition: Partition, request: Request, num_copies: int, network: Link | Cluster | None) -> float:
    """Returns what summing the most gradients of one rank over all that have them takes, hidden by nothing."""
    if num_copies == 1 or network is None:
        return 0.0
    modules = {one.name: one for one in request.model.modules}
    trained = [0] * partition.num_ranks
    for chunk in partition.chunks:
        for part in chunk.parts:
            module = modules[part.module]
            own = (layer for layer in range(part.first, part.end) if module.trains[layer])
            trained[chunk.rank] += sum(module.num_parameters(layer, 1) for layer in own)
    return network.all_reduce_ms(GRADIENT_BYTES * max(trained), num_copies)


@dataclass(kw_only=True)
class RanStep:
    """One step that has run on this rank."""

    losses: Tensor
    """Of each microbatch, on every rank."""
    times: ActionTimes
    """Of this rank's actions."""


def lacks_weights(model: nn.Module) -> bool:
    """Returns whether a model is on the meta device, because no rank has memory for all of it."""
    return any(one.is_meta for one in model.parameters())


class PipelineRunner:
    """Runs steps of one plan on this rank."""

    def __init__(
        self,
        model: nn.Module,
        planner: StepPlanner,
        counted: CountedModel,
        loss: Loss,
        *,
        grid: RankGrid,
        slices: WeightSlices | None = None,
        backend: Backend | None = None,
        keeps_all: bool = False,
    ) -> None:
        """Gives up what the rank does not need, and opens its lanes.

        Args:
            model: The user's.
            way: How its steps are planned.
            counted: As planning sees the model.
            loss: Of its output.
            grid: All ranks.
            slices: Of weights that tensor ranks share.
            backend: What the rank runs on; None: it has no lanes.
            keeps_all: Whether the weights of other ranks stay, since another way may need them. Where they have no
                memory yet, nothing of them stays in any case.

        Raises:
            InvalidPlanError: The partition's lanes cannot do their work at the same time.
        """
        check_lanes(model, counted.split, planner.partition, planner.degrees)
        self.planner, self.grid, self._slices = planner, grid, slices
        chunks = planner.partition.chunks
        own = (
            None
            if keeps_all and not lacks_weights(model)
            else [index for index, chunk in enumerate(chunks) if chunk.rank == grid.place]
        )
        self.parted = PartedModel(model, counted.split, [chunk.parts for chunk in chunks], own, keeps_buffers=keeps_all)
        if slices is not None:
            slices.forget_dropped()
        with self.parted.lent_memory():
            self.sums = GradientSums(model, counted.split, planner.partition, grid, slices)
        self._counted, self._loss = counted, loss
        group = grid.context_group
        self._items = None if group is None else SharedItems(self.parted, group)
        self.numbers = DrawnNumbers(self.parted)
        self._lanes: LaunchMode = InTurn() if backend is None else open_lanes(backend, planner.partition, grid.place)
        grid.transport.open_lanes(lane_pairs(planner.partition, counted.split.feeds))

    def run(
        self,
        shared: SharedStep,
        microbatches: Sequence[Mapping[str, Any]],
        *,
        shapes: Sequence[str],
        scale: Scale | None = None,
        is_training: bool = True,
    ) -> RanStep:
        """Runs a step forward and backward, and tells everyone the losses.

        Args:
            shared: Who runs what.
            microbatches: The step's data.
            shapes: Names the shapes of each.
            scale: Of losses before backward.
            is_training: Whether gradients are summed; not where schedules are of forwards alone.
        """
        share, schedule = shared.shares[self.grid.replica], shared.schedules[self.grid.replica]
        states = self.numbers.before_each(microbatches)
        if is_training:
            self.sums.begin()
        losses: dict[int, float] = {}
        times = ActionTimes(cells=())
        if schedule is not None:
            data = StepData(
                split=self._counted.split,
                partition=self.planner.partition,
                schedule=schedule,
                microbatches=[microbatches[at] for at in share],
                layers=self._counted.layers,
                averaged_over=len(microbatches) / self.grid.num_copies,
                units_together=self._counted.units_together,
                items=self._items if not any(map(self.numbers.draw, microbatches)) else None,
            )
            work = ChunkWork(
                self.parted,
                self._loss,
                data,
                numbers=self.numbers,
                states=[states[at] for at in share],
                scale=scale,
                reduce=self.sums.start,
            )
            with self.grid.transport.explaining():
                named = "; ".join(shapes[at] for at in share)
                ran = self.grid.executor.run(schedule, work, shapes=named, is_timed=True, lanes=self._lanes)
            assert ran is not None
            times = ran
            if self.grid.tensor == 0:
                losses = {share[at]: float(loss) for at, loss in work.losses.items()}
        if is_training:
            self._end_sums()
        return RanStep(losses=self._losses(losses, len(microbatches)), times=times)

    def _end_sums(self) -> None:
        transport = self.grid.transport
        try:
            self.sums.finish()
            if self._slices is not None:
                self._slices.check_once()
        except RankFailedError:
            raise
        except BaseException as error:
            transport.abort(f"failed in summing gradients: {type(error).__name__}: {error}")
            raise

    def _losses(self, losses: Mapping[int, float], count: int) -> Tensor:
        """Returns the losses of all ranks; each of those that share a sequence has a part."""
        found = [0.0] * count
        for text in self.grid.transport.tell_all(json.dumps(losses)):
            for at, loss in json.loads(text).items():
                found[int(at)] += loss
        return torch.tensor(found)
