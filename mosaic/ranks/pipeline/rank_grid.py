"""Ranks as replicas of a pipeline: who is in whose pipeline, and who has the same layers.

Ranks of one replica are neighbours, so that it can be one node: with ``data=2, pipeline=2, tensor=2``::

    rank      0  1  2  3  4  5  6  7
    replica   0  0  0  0  1  1  1  1
    place     0  0  1  1  0  0  1  1
    tensor    0  1  0  1  0  1  0  1

Ranks that share a sequence have the same layers, as those of different replicas do; they lie between place and tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from mosaic.pipelining.rank_hardware import Degrees
from mosaic.ranks.pipeline.executor import Executor
from mosaic.ranks.pipeline.transport import Transport
from mosaic.ranks.world.world import World


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

    def of_tensor(self, degree: int) -> dist.ProcessGroup:
        """Returns that of the ranks that share this one's layers: so many neighbours."""
        starts = range(0, self.world.size, degree)
        groups = [self.of(range(start, start + degree)) for start in starts]
        return groups[self.world.rank // degree]

    def of_context(self, degrees: Degrees) -> dist.ProcessGroup:
        """Returns that of the ranks that share this one's sequences."""
        block, tensor = degrees.context * degrees.tensor, degrees.tensor
        starts = [start + index for start in range(0, self.world.size, block) for index in range(tensor)]
        groups = {start: self.of(range(start, start + block, tensor)) for start in starts}
        rank = self.world.rank
        return groups[rank // block * block + rank % tensor]


class RankGrid:
    """All ranks by replica, place in the pipeline and tensor index; and this rank in it. All ranks make it.

    Args:
        groups: Of all ranks.
        degrees: As many along each axis.

    Attributes:
        world: All ranks.
        degrees: As many along each axis.
        replica: Which replica this rank belongs to.
        place: Its rank in the pipeline, as partitions and schedules have it.
        context: Its index among those that share its sequences.
        tensor: Its index among those that share its layers.
        context_group: Those ranks, where there are several.
        transport: To the other places of its replica.
        executor: Of its replica's schedules.
    """

    def __init__(self, groups: GroupsOfRanks, degrees: Degrees) -> None:
        self.world, self.degrees, self._groups = groups.world, degrees, groups
        rest, self.tensor = divmod(self.world.rank, degrees.tensor)
        rest, self.context = divmod(rest, degrees.context)
        self.replica, self.place = divmod(rest, degrees.pipeline)
        lines = [
            [self.rank_of(replica, place, context, tensor) for place in range(degrees.pipeline)]
            for replica in range(degrees.data)
            for context in range(degrees.context)
            for tensor in range(degrees.tensor)
        ]
        name = f"pipeline/{degrees.data}x{degrees.pipeline}x{degrees.context}x{degrees.tensor}"
        self.transport = Transport(self.world, lines=lines, name=name)
        self.executor = Executor(self.transport)
        if degrees.tensor > 1:
            self.transport.cover(groups.of_tensor(degrees.tensor))
        self.context_group = groups.of_context(degrees) if degrees.context > 1 else None
        if self.context_group is not None:
            self.transport.cover(self.context_group)

    @property
    def num_copies(self) -> int:
        """Ranks that have the same layers: of all replicas, and of all that share their sequences."""
        return self.degrees.data * self.degrees.context

    def rank_of(self, replica: int, place: int, context: int, tensor: int) -> int:
        """Returns the rank of the world at a place."""
        degrees = self.degrees
        return ((replica * degrees.pipeline + place) * degrees.context + context) * degrees.tensor + tensor

    def holders(self, places: Sequence[int], tensors: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the ranks of all replicas at some places, with some tensor indices; by default with all."""
        indices = range(self.degrees.tensor) if tensors is None else tensors
        return tuple(
            self.rank_of(replica, at, context, index)
            for replica in range(self.degrees.data)
            for at in places
            for context in range(self.degrees.context)
            for index in indices
        )

    def group_of(self, places: Sequence[int], *, over_tensor: bool = False) -> dist.ProcessGroup | None:
        """Returns the communicator of the holders of some places, or None; all ranks ask in one order.

        It is aborted when a rank fails, as the transport is.

        Args:
            places: In the pipeline.
            over_tensor: Whether those of all tensor indices are together.
        """
        together = [range(self.degrees.tensor)] if over_tensor else [[index] for index in range(self.degrees.tensor)]
        groups = [self._groups.of(self.holders(places, indices)) for indices in together]
        if self.place not in places:
            return None
        own = groups[0 if over_tensor else self.tensor]
        self.transport.cover(own)
        return own


class RankGrids:
    """The grids that are in use; a trial has several.

    Args:
        world: All ranks.

    Attributes:
        groups: Of all of them.
    """

    def __init__(self, world: World) -> None:
        self.world, self.groups = world, GroupsOfRanks(world)
        self._open: dict[Degrees, RankGrid] = {}

    def of(self, degrees: Degrees) -> RankGrid:
        """Returns that of some degrees; all ranks ask in one order."""
        if degrees not in self._open:
            self._open[degrees] = RankGrid(self.groups, degrees)
        return self._open[degrees]

    def close(self) -> None:
        """Ends all of them, the last one first, as each explains errors before the one that was there."""
        while self._open:
            _, grid = self._open.popitem()
            grid.transport.close()
