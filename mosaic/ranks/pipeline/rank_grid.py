"""Ranks as replicas of a pipeline: who is in whose pipeline, and who has the same layers.

Ranks of one replica are neighbours, so that it can be one node: with ``data=2, pipeline=2, tensor=2``::

    rank      0  1  2  3  4  5  6  7
    replica   0  0  0  0  1  1  1  1
    place     0  0  1  1  0  0  1  1
    tensor    0  1  0  1  0  1  0  1

Ranks that share a sequence have the same layers, as those of different replicas do; they lie between place and tensor.

Places may have different numbers of tensor ranks, as modules with degrees of their own need (Cornstarch, section 3.2).
All tensor ranks of a place have the whole of what goes in and out of it, so the rank at tensor index ``t`` receives
from the one at ``t`` modulo the sender's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import torch.distributed as dist

from mosaic.pipelining.rank_hardware import Degrees
from mosaic.ranks.pipeline.executor import Executor
from mosaic.ranks.pipeline.transport import Transport
from mosaic.ranks.world.world import World


class Position(NamedTuple):
    replica: int
    place: int
    """Rank in the pipeline, as partitions and schedules have it."""
    context: int
    """Index among the ranks that share its sequences."""
    tensor: int
    """Index among the ranks that share its layers."""


def positions(degrees: Degrees) -> list[Position]:
    return [
        Position(replica, place, context, tensor)
        for replica in range(degrees.data)
        for place, width in enumerate(degrees.widths)
        for context, tensor in product(range(degrees.context), range(width))
    ]


class RankGrid:
    """All ranks by replica, place in the pipeline and tensor index, and this rank among them. All ranks make it."""

    def __init__(self, grids: RankGrids, degrees: Degrees) -> None:
        self.world, self.degrees, self._grids = grids.world, degrees, grids
        self._ranks = {position: rank for rank, position in enumerate(positions(degrees))}
        self.replica, self.place, self.context, self.tensor = positions(degrees)[self.world.rank]
        lines = [
            [self._ranks[Position(replica, place, context, at % width)] for place, width in enumerate(degrees.widths)]
            for replica in range(degrees.data)
            for context in range(degrees.context)
            for at in range(degrees.tensor)
        ]
        name = f"pipeline/{degrees.data}x{degrees.pipeline}x{degrees.context}x{'-'.join(map(str, degrees.widths))}"
        self.transport = Transport(self.world, lines=lines, name=name)
        self.executor = Executor(self.transport)
        if degrees.tensor > 1:
            self.transport.cover(grids.tensor_group(degrees))
        self.context_group = grids.context_group(degrees) if degrees.context > 1 else None
        if self.context_group is not None:
            self.transport.cover(self.context_group)

    @property
    def num_copies(self) -> int:
        """Number of ranks with the same layers: of all replicas, and of all that share their sequences."""
        return self.degrees.data * self.degrees.context

    def holders(self, places: Sequence[int], tensors: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the ranks of all replicas at some places, with some tensor indices; by default with all."""
        return tuple(
            rank for at, rank in self._ranks.items() if at.place in places and (tensors is None or at.tensor in tensors)
        )

    def group_of(self, places: Sequence[int], *, over_tensor: bool = False) -> dist.ProcessGroup | None:
        """Returns the communicator of the holders of some places, or None without this rank.

        All ranks request it in one order. It is aborted when a rank fails, as the transport is.
        """
        width = self.degrees.widths[places[0]]
        together = [range(width)] if over_tensor else [[index] for index in range(width)]
        groups = [self._grids.group(self.holders(places, indices)) for indices in together]
        if self.place not in places:
            return None
        own = groups[0 if over_tensor else self.tensor]
        self.transport.cover(own)
        return own


class RankGrids:
    """The grids that are in use, of which a trial has several, and the communicators of ranks that sum or share."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._open: dict[Degrees, RankGrid] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, degrees: Degrees) -> RankGrid:
        """Returns the grid of some degrees; all ranks request it in one order."""
        if degrees not in self._open:
            self._open[degrees] = RankGrid(self, degrees)
        return self._open[degrees]

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Returns the one communicator of some ranks; all ranks request it in one order."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = self.world.group(key)
        return self._groups[key]

    def tensor_group(self, degrees: Degrees) -> dist.ProcessGroup:
        """Returns the communicator of the ranks that share this one's layers: its neighbours."""
        return self._peers(at._replace(tensor=0) for at in positions(degrees))

    def context_group(self, degrees: Degrees) -> dist.ProcessGroup:
        """Returns the communicator of the ranks that share this one's sequences."""
        return self._peers(at._replace(context=0) for at in positions(degrees))

    def close(self) -> None:
        """Ends all grids, the last one first, because each explains errors before the one that was there."""
        while self._open:
            _, grid = self._open.popitem()
            grid.transport.close()

    def _peers(self, keys: Iterable[Position]) -> dist.ProcessGroup:
        """Returns the communicator of the ranks with this one's key; all ranks request all of them."""
        ranks: dict[Position, list[int]] = {}
        for rank, key in enumerate(keys):
            ranks.setdefault(key, []).append(rank)
        groups = [self.group(peers) for peers in ranks.values()]
        return next(group for group, peers in zip(groups, ranks.values(), strict=True) if self.world.rank in peers)
