"""The lanes of a rank: which slots each row of its partition has, and how they do their actions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mosaic.backends.base import Backend
from mosaic.errors import InvalidPlanError
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.partition.partition import Partition
from mosaic.ranks.pipeline.executing.lane_ways import InTurn, LaneWay, OnStreams, OnThreads


def open_lanes(backend: Backend, partition: Partition, rank: int) -> LaneWay:
    """Opens a lane for each row of a rank; where it has one row, that runs on all slots, on the calling thread.

    Raises:
        InvalidPlanError: The device has fewer slots than the rank has lanes.
    """
    shares = _shares_of(partition, rank)
    if len(shares) < 2:
        return InTurn()
    slots = slots_of(shares, backend.device.num_slots)
    lanes = backend.open_lanes(slots)
    if lanes.streams is not None:
        return OnStreams(lanes.streams, [lanes.streams.lane(each) for each in slots])
    return OnThreads(lanes, [lanes.lane(each) for each in slots])


def slots_of(shares: Sequence[float], num_slots: int) -> tuple[tuple[int, ...], ...]:
    """Returns for each lane its slots, one lane behind the other: its share of all, rounded, and at least one.

    Raises:
        InvalidPlanError: There are fewer slots than lanes.
    """
    if len(shares) > num_slots:
        raise InvalidPlanError(
            f"{len(shares)} lanes on a device of {num_slots} slots; a lane has one at least: use a partition with fewer"
        )
    counts = [max(1, round(share * num_slots)) for share in shares]
    while sum(counts) > num_slots:
        counts[counts.index(max(counts))] -= 1
    ends = [sum(counts[: at + 1]) for at in range(len(counts))]
    return tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True))


def check_lanes_apart(model: nn.Module, split: ModelSplit, partition: Partition) -> None:
    """Checks that no two lanes of a rank train one parameter: they would add to its gradient in no fixed order.

    Raises:
        InvalidPlanError: They do; names it.
    """
    named, chunks = dict(model.named_parameters()), partition.chunks
    for name, users in split.shared_parameters([chunk.parts for chunk in chunks]):
        if not named[name].requires_grad:
            continue
        lanes: dict[int, set[int]] = {}
        for index in users:
            lanes.setdefault(chunks[index].rank, set()).add(chunks[index].lane)
        rank = next((rank for rank, found in lanes.items() if len(found) > 1), None)
        if rank is not None:
            raise InvalidPlanError(
                f"lanes {', '.join(map(str, sorted(lanes[rank])))} of rank {rank} both train {name}, and would add to "
                "its gradient in no fixed order; use a partition with what shares it on one lane"
            )


def _shares_of(partition: Partition, rank: int) -> tuple[float, ...]:
    """Returns the share of each lane of a rank that runs something, in order."""
    return tuple(
        next(chunk.share for chunk in partition.chunks if chunk.row == row)
        for row in partition.rows
        if row[0] == rank and any(chunk.row == row for chunk in partition.chunks)
    )
