"""Ways to run a model's steps in a pipeline: planned for each step, or as a baseline does; all on one executor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mosaic.parts.parted_model import PartedModel
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.baselines.methods import BASELINES
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.planner import PlannedStep, PlannerOptions, plan_baseline, plan_step
from mosaic.pipelining.rank_space import RankSpace
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.pipelining.tasks import TaskGraph
from mosaic.pipelining.workload.counted import CountedMicrobatch
from mosaic.pipelining.workload.microbatch import Microbatch
from mosaic.ranks.meeting.world import World
from mosaic.ranks.pipeline.chunk_work import ChunkWork, Loss, Scale
from mosaic.ranks.pipeline.counting import CountedModel
from mosaic.ranks.pipeline.executing.executor import ActionTimes, Executor
from mosaic.ranks.pipeline.random_numbers import DrawnNumbers
from mosaic.ranks.pipeline.step_data import StepData

PLANNED = "planned"
"""Name of the way that plans each step."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How steps are planned."""

    name: str
    """``planned``, or one of ``BASELINES``."""
    request: Request
    """Model, ranks, and the microbatches that its partition was made for."""
    space: RankSpace
    """What ranks are."""
    options: PlannerOptions
    """Of what is planned."""
    partition: Partition
    """Where layers are."""

    @classmethod
    def make(cls, name: str, request: Request, space: RankSpace, options: PlannerOptions) -> Way:
        """Plans where layers are, for a step of the request's microbatches."""
        if name in BASELINES:
            partition = plan_baseline(name, request, request.microbatches, space=space).partition
        else:
            partition = plan_step(request, request.microbatches, space=space, options=options).partition
        return cls(name=name, request=request, space=space, options=options, partition=partition)

    def tasks(self, step: Sequence[Microbatch], schedule: PipelineSchedule) -> TaskGraph:
        """Returns the tasks of a step, with the times and bytes of its schedule's strategies."""
        chosen = {TaskName.parse(text): layers for text, layers in schedule.strategies.items()}
        pairs = {(task.chunk, task.microbatch, task.piece): layers for task, layers in chosen.items()}
        return self.space.tasks(
            self.request,
            self.partition,
            step,
            strategies=pairs or schedule.strategy,
            weights_apart=any("W" in cell for row in schedule.rows for cell in row if cell[0].isdigit()),
        )

    def plan(self, step: Sequence[Microbatch], *, seconds: float | None = None) -> PlannedStep:
        """Plans a step; ``seconds`` in the place of the options' limit."""
        if self.name in BASELINES:
            return plan_baseline(self.name, self.request, step, space=self.space)
        limits = self.options.limits if seconds is None else replace(self.options.limits, seconds=seconds)
        options = replace(self.options, limits=limits, method=self.options.method if limits.seconds else "natural")
        return plan_step(self.request, step, space=self.space, options=options, partition=self.partition)


def shapes_of(step: Sequence[CountedMicrobatch]) -> str:
    """Names the shapes of a step: microbatches of one key have the same."""
    return "; ".join(one.key for one in step)


@dataclass(kw_only=True)
class RanStep:
    """One step that has run on this rank."""

    losses: Tensor
    """Of each microbatch, on every rank."""
    times: ActionTimes
    """Of this rank's actions."""


class WayRunner:
    """Runs steps of one way on this rank."""

    def __init__(
        self,
        model: nn.Module,
        way: Way,
        counted: CountedModel,
        loss: Loss,
        *,
        executor: Executor,
        groups: GroupsOfRanks,
        keeps_all: bool = False,
    ) -> None:
        """``keeps_all``: whether the weights of other ranks stay, since another way may need them."""
        self.way = way
        chunks = way.partition.chunks
        own = None if keeps_all else [index for index, chunk in enumerate(chunks) if chunk.rank == groups.world.rank]
        self._parted = PartedModel(model, counted.split, [chunk.parts for chunk in chunks], own)
        self.shared = SharedGradients(model, counted.split, way.partition, groups)
        self._counted, self._loss, self._executor = counted, loss, executor
        self._numbers = DrawnNumbers(self._parted)

    def run(
        self,
        schedule: PipelineSchedule,
        microbatches: Sequence[Mapping[str, Any]],
        *,
        shapes: str,
        scale: Scale | None = None,
    ) -> RanStep:
        """Runs a step forward and backward, and tells everyone the losses.

        Args:
            schedule: Of the step.
            microbatches: Its data.
            shapes: Names their shapes.
            scale: Of losses before backward.
        """
        data = StepData(
            split=self._counted.split,
            partition=self.way.partition,
            schedule=schedule,
            microbatches=microbatches,
            layers=self._counted.layers,
        )
        work = ChunkWork(self._parted, self._loss, data, numbers=self._numbers, scale=scale)
        times = self._executor.run(schedule, work, shapes=shapes, is_timed=True)
        assert times is not None
        self.shared.sum()
        told = self._executor.transport.tell(json.dumps({at: float(loss) for at, loss in work.losses.items()}))
        losses = {int(at): loss for text in told for at, loss in json.loads(text).items()}
        return RanStep(losses=torch.tensor([losses[at] for at in range(len(microbatches))]), times=times)


class GroupsOfRanks:
    """One communicator for each set of ranks that sum gradients; all ranks ask in one order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Returns that of some ranks."""
        key = tuple(ranks)
        if key not in self._made:
            self._made[key] = self.world.group(key)
        return self._made[key]


class SharedGradients:
    """Parameters that several ranks hold: their gradients are summed after each step.

    Attributes:
        counted_elsewhere: Ids of this rank's parameters that an earlier rank holds, too.
    """

    def __init__(self, model: nn.Module, split: ModelSplit, partition: Partition, groups: GroupsOfRanks) -> None:
        named, rank = dict(model.named_parameters()), groups.world.rank
        self._groups: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.counted_elsewhere: set[int] = set()
        for name, chunks in split.shared_parameters([chunk.parts for chunk in partition.chunks]):
            ranks = sorted({partition.chunks[index].rank for index in chunks})
            if len(ranks) < 2:
                continue
            group = groups.of(ranks)
            if rank in ranks and named[name].requires_grad:
                self._groups.append((named[name], group))
                if rank != ranks[0]:
                    self.counted_elsewhere.add(id(named[name]))

    def sum(self) -> None:
        """Sums gradients; all ranks that hold a parameter call it."""
        for parameter, group in self._groups:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
