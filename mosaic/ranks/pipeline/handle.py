"""A model that runs in a pipeline: steps of microbatches, and what a loop needs beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mosaic.checkpoint.methods import KeepsCheckpoints
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.planner import PlannedStep, PlannerOptions, plan_step
from mosaic.pipelining.rank_space import RankSpace
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.ranks.meeting.world import World
from mosaic.ranks.pipeline.chunk_work import ChunkWork, Loss
from mosaic.ranks.pipeline.counting import CountedModel
from mosaic.ranks.pipeline.distributed import DistributedTransport
from mosaic.ranks.pipeline.executor import Executor
from mosaic.ranks.pipeline.step_data import StepData

MAX_SCHEDULES = 256
"""Steps of different shapes whose schedules are kept."""


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """What a pipeline is made of."""

    counted: CountedModel
    """The model, as planning sees it."""
    request: Request
    """What was planned for."""
    partition: Partition
    """Where layers are."""
    space: RankSpace
    """What ranks are."""
    options: PlannerOptions
    """How steps are planned."""
    loss: Loss
    """Makes a number of the output."""


class Pipeline(KeepsCheckpoints):
    """A model whose layers are on several ranks; every rank makes the same calls.

    Attributes:
        world: The ranks.
        partition: Which layers are where.
    """

    def __init__(self, model: nn.Module, world: World, parts: PipelineParts) -> None:
        self.world = world
        self.partition = parts.partition
        self._model = model
        self._ranks = world
        self._parts = parts
        split, chunks = parts.counted.split, [chunk.parts for chunk in parts.partition.chunks]
        own = [index for index, chunk in enumerate(parts.partition.chunks) if chunk.rank == world.rank]
        self._parted = PartedModel(model, split, chunks, own)
        self._shared = _Shared(model, split, parts.partition, world)
        self._transport = DistributedTransport(world)
        self._executor = Executor(self._transport, split=repr(split.modules))
        self._schedules: dict[tuple[str, ...], PipelineSchedule] = {}
        self._own = own

    def step(self, microbatches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Runs forward and backward of a step; gradients are those of the mean of the microbatches' losses.

        Args:
            microbatches: The step's, the same on every rank: keyword arguments of the model.

        Returns:
            The loss of each microbatch, on every rank.

        Raises:
            ValueError: There are no microbatches.
            InvalidScheduleError: Ranks have other microbatches.
            RankFailedError: Another rank has failed; names it.
        """
        if not microbatches:
            raise ValueError("no microbatches; a step has at least one")
        schedule = self._schedule(microbatches)
        counted = self._parts.counted
        data = StepData(
            split=counted.split,
            partition=self.partition,
            schedule=schedule,
            microbatches=microbatches,
            layers=counted.layers,
        )
        work = ChunkWork(self._parted, self._parts.loss, data)
        self._executor.run(schedule, work)
        self._shared.sum()
        told = self._transport.tell(json.dumps({str(at): float(loss) for at, loss in work.losses.items()}))
        losses = {int(at): loss for text in told for at, loss in json.loads(text).items()}
        return torch.tensor([losses[at] for at in range(len(microbatches))])

    def parameters(self) -> Iterable[nn.Parameter]:
        """Returns the parameters that are on this rank."""
        return [one for one in self._model.parameters() if not one.is_meta]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients of all ranks so that their norm is at most ``max_norm``; returns the norm before."""
        counted_elsewhere = self._shared.counted_elsewhere
        grads = [one.grad for one in self.parameters() if one.grad is not None]
        own = [one.grad for one in self.parameters() if one.grad is not None and id(one) not in counted_elsewhere]
        total = torch.stack([grad.detach().double().square().sum() for grad in own]).sum() if own else torch.zeros(())
        total = total.double().to(self.world.device)
        dist.all_reduce(total, group=self.world.everyone)
        norm = total.sqrt()
        scale = min(1.0, max_norm / (float(norm) + 1e-6))
        if scale < 1:
            for grad in grads:
                grad.mul_(scale)
        return norm

    def plan(self, microbatches: Sequence[Mapping[str, Any]]) -> PlannedStep:
        """Plans a step on this rank alone; nothing is run."""
        parts = self._parts
        step = [parts.counted.microbatch(one) for one in microbatches]
        return plan_step(parts.request, step, space=parts.space, options=parts.options, partition=self.partition)

    def describe(self) -> str:
        """Returns which chunks are on which rank."""
        lines = [f"{self.partition.num_ranks} ranks"]
        for rank in range(self.partition.num_ranks):
            chunks = [str(chunk) for chunk in self.partition.chunks if chunk.rank == rank]
            lines.append(f"rank {rank}: {', '.join(chunks)}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Leaves the other ranks; the model keeps the weights that are here."""
        self._transport.close()

    def _schedule(self, microbatches: Sequence[Mapping[str, Any]]) -> PipelineSchedule:
        step = tuple(self._parts.counted.microbatch(one).key for one in microbatches)
        if step not in self._schedules:
            own = self.plan(microbatches).schedule() if self.world.rank == 0 else None
            schedule = self.world.first_says(own)
            assert schedule is not None
            if len(self._schedules) >= MAX_SCHEDULES:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[step] = schedule
        return self._schedules[step]

    def _plan_name(self) -> str:
        return f"pipeline of {self.partition.num_ranks}"

    def _settle(self) -> None:
        """Does nothing: a step has ended when ``step`` returns."""


class _Shared:
    """Parameters that several ranks hold: their gradients are summed after each step."""

    def __init__(self, model: nn.Module, split: ModelSplit, partition: Partition, world: World) -> None:
        named = dict(model.named_parameters())
        self._groups: list[tuple[nn.Parameter, Any]] = []
        self.counted_elsewhere: set[int] = set()
        for name, chunks in split.shared_parameters([chunk.parts for chunk in partition.chunks]):
            ranks = sorted({partition.chunks[index].rank for index in chunks})
            if len(ranks) < 2:
                continue
            group = world.group(ranks)
            if world.rank in ranks and named[name].requires_grad:
                self._groups.append((named[name], group))
                if world.rank != ranks[0]:
                    self.counted_elsewhere.add(id(named[name]))

    def sum(self) -> None:
        """Sums gradients; all ranks that hold a parameter call it."""
        for parameter, group in self._groups:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
