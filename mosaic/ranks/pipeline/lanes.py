"""The lanes of a rank: the slots of each, and checks that they can work at the same time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from mosaic.backends.base import Backend
from mosaic.backends.host import HostBackend
from mosaic.backends.table import default_backend
from mosaic.errors import BackendUnavailableError, InvalidPlanError
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.partition import Partition
from mosaic.pipelining.plan import PipelinePlan
from mosaic.ranks.pipeline.executor import InTurn, LaunchMode, OnStreams, OnThreads
from mosaic.ranks.pipeline.transport import LanePair
from mosaic.ranks.world.groups import cores_of_rank, own_gpu
from mosaic.ranks.world.world import World

_LOG = logging.getLogger("mosaic")


def backend_of(world: World) -> Backend | None:
    """Returns the backend of this rank: its GPU, or its share of its machine's cores; None for a GPU without lanes."""
    if world.device.type == "cuda":
        try:
            return default_backend(torch.device("cuda", own_gpu()))
        except BackendUnavailableError as problem:
            _LOG.warning("ranks of the pipeline have no lanes: %s", problem)
            return None
    homes = world.all_gather(world.me.host)
    beside = [rank for rank, home in enumerate(homes) if home == world.me.host]
    return HostBackend(cores=cores_of_rank(beside.index(world.rank), len(beside)))


def open_lanes(backend: Backend | None, partition: Partition, rank: int) -> LaunchMode:
    """Opens a lane for each row of a rank; one row, or all without a backend, run on the calling thread."""
    rows = [row for row in partition.rows if row[0] == rank]
    shares = [next((chunk.share for chunk in partition.chunks if chunk.row == row), 0.0) for row in rows]
    shares = [share for share in shares if share]
    if backend is None or len(shares) < 2:
        return InTurn()
    slots = slots_of(shares, backend.device.num_slots)
    lanes = backend.open_lanes(slots)
    if lanes.streams is not None:
        return OnStreams(lanes.streams, [lanes.streams.lane(each) for each in slots])
    return OnThreads(lanes, [lanes.lane(each) for each in slots])


def slots_of(shares: Sequence[float], num_slots: int) -> tuple[tuple[int, ...], ...]:
    """Returns the slots of each lane, one lane behind the other: its share of all, rounded, and at least one."""
    if len(shares) > num_slots:
        raise InvalidPlanError(
            f"{len(shares)} lanes on a device of {num_slots} slots; a lane has one at least: use a partition with fewer"
        )
    counts = [max(1, round(share * num_slots)) for share in shares]
    while sum(counts) > num_slots:
        counts[counts.index(max(counts))] -= 1
    return tuple(tuple(range(end - count, end)) for end, count in zip(accumulate(counts), counts, strict=True))


def check_lanes(model: nn.Module, split: ModelSplit, plan: PipelinePlan) -> None:
    """Raises InvalidPlanError unless the lanes of each rank can do their work at the same time."""
    partition, degrees = plan.partition, plan.degrees
    if degrees.tensor * degrees.context > 1 and len(partition.rows) > partition.num_ranks:
        raise InvalidPlanError(
            f"the partition has lanes, and tensor={degrees.tensor}, context={degrees.context} ranks share layers or "
            "sequences: lanes would exchange with them in no fixed order; use a partition without lanes, or 1 of both"
        )
    named, chunks = dict(model.named_parameters()), partition.chunks
    for name, users in split.shared_parameters([chunk.parts for chunk in chunks]):
        if not named[name].requires_grad:
            continue
        lanes: dict[int, set[int]] = {}
        for index in users:
            lanes.setdefault(chunks[index].rank, set()).add(chunks[index].lane)
        rank = next((rank for rank, numbers in lanes.items() if len(numbers) > 1), None)
        if rank is not None:
            raise InvalidPlanError(
                f"lanes {', '.join(map(str, sorted(lanes[rank])))} of rank {rank} both train {name}, and would add to "
                "its gradient in no fixed order; use a partition with what shares it on one lane"
            )


def describe_lanes(partition: Partition, rank: int) -> str:
    """Names the chunks of a rank, by lane if it has several."""
    lanes: dict[tuple[int, float], list[str]] = {}
    for chunk in partition.chunks:
        if chunk.rank == rank:
            lanes.setdefault((chunk.lane, chunk.share), []).append(str(chunk))
    if len(lanes) < 2:
        return ", ".join(chunk for names in lanes.values() for chunk in names)
    return "; ".join(f"lane {lane} ({share:.0%}): {', '.join(names)}" for (lane, share), names in sorted(lanes.items()))


def lane_pairs(partition: Partition, feeds: Sequence[tuple[str, str]]) -> frozenset[LanePair]:
    """Returns the lanes between which ranks may send messages, for microbatches of any modalities."""
    behind = {name: {name} for name in partition.modules}
    for _ in behind:  # where a module is skipped, what it feeds is fed by what feeds it
        for before, after in feeds:
            behind[before] |= behind[after]
    pairs: set[LanePair] = set()
    for source in partition.chunks:
        reached = {name for part in source.parts for name in behind[part.module]}
        for target in partition.chunks:
            if target.rank != source.rank and reached & {part.module for part in target.parts}:
                pairs |= {(source.lane, target.lane), (target.lane, source.lane)}
    return frozenset(pairs)
