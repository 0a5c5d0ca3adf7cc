"""Given for a pipeline, and made sure of: equal weights on all ranks, plans, numbers of replicas."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from mosaic.artifact import fingerprint, load
from mosaic.errors import BackendUnavailableError, InvalidScheduleError
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.schedule.partition import partition_of_schedule
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.pipelining.semu.rank_hardware import Degrees
from mosaic.ranks.meeting.world import World

Plan = Partition | PipelineSchedule | str | Path


def partition_of(plan: Plan, request: Request) -> Partition:
    """Returns where a plan has a model's layers.

    Raises:
        InvalidScheduleError: It is of another model; names both.
        InvalidFileError: The file is no schedule.
    """
    if isinstance(plan, str | Path):
        plan = load(PipelineSchedule, Path(plan))
    partition = plan if isinstance(plan, Partition) else partition_of_schedule(plan, request)
    try:
        partition.check_covers(request.model)
    except ValueError as error:
        raise InvalidScheduleError(f"the plan is of another model: {error}") from None
    return partition


def degrees_of(num_ranks: int, *, data: int | None, partition: Partition | None) -> Degrees:
    """Returns how ranks are laid out: as many replicas as were asked for, or as a partition leaves ranks for.

    Raises:
        ValueError: They cannot be.
    """
    if data is not None and (data < 1 or num_ranks % data):
        raise ValueError(f"data={data}, and there are {num_ranks} ranks; use a number that divides them")
    if partition is None:
        return Degrees(data=data or 1, pipeline=num_ranks // (data or 1))
    places = partition.num_ranks
    found = num_ranks // places if data is None else data
    if found * places != num_ranks:
        raise ValueError(
            f"the plan is for {places} ranks, and {num_ranks} with data={data} leave others; start "
            f"{max(1, found) * places} ranks, or plan for {num_ranks // (data or 1)}"
        )
    return Degrees(data=found, pipeline=places)


def check_same_weights(model: nn.Module, world: World) -> None:
    """Raises BackendUnavailableError, on all ranks, unless their models have the same weights."""
    tensors = (*model.parameters(), *model.buffers())
    values = [torch.hash_tensor(one.detach()).view(torch.int64) for one in tensors if one.numel() and not one.is_meta]
    told = world.tell(fingerprint([int(one) for one in values]))
    other = next((rank for rank, found in enumerate(told) if found != told[0]), None)
    if other is not None:
        raise BackendUnavailableError(
            "the ranks' models have other weights; seed all ranks alike before the model is made, or load one file",
            found=f"{told[other][:8]} on rank {other}",
            needed=f"{told[0][:8]} as on rank 0",
        )
