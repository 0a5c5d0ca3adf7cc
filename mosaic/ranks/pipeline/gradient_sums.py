"""Gradients of weights that several ranks have: the mean over replicas, and the sum over places of tied weights.

A chunk's gradients are summed while the rest of the step runs, once its last backward has. Replicas end chunks in
orders of their own, and sums of one communicator have to begin in one order: the later chunk's first, as backwards end
in most schedules; one that is ready too early waits for its turn. Weights that several chunks use come at the end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from mosaic.parts.split import ModelSplit
from mosaic.pipelining.partition.partition import Partition
from mosaic.ranks.meeting.progress import THE_LOOP
from mosaic.ranks.parameters.reduce import GradientReducer, sparse_in
from mosaic.ranks.pipeline.rank_grid import RankGrid


@dataclass(slots=True, kw_only=True)
class _Tied:
    """A weight of chunks on several places."""

    parameter: nn.Parameter
    reducer: GradientReducer
    num_places: int
    before: Tensor | None = None
    """Its gradient of earlier steps, which is summed already."""

    def begin(self) -> None:
        """Puts that aside."""
        self.before, self.parameter.grad = self.parameter.grad, None

    def finish(self) -> None:
        """Makes of the mean over all holders the sum over places, and adds what was put aside."""
        self.reducer.finish()
        summed = self.parameter.grad
        if summed is not None:
            summed.mul_(self.num_places)
        if self.before is not None:
            self.parameter.grad = self.before if summed is None else self.before.add_(summed)
        self.before = None


class GradientSums:
    """Sums this rank's gradients, step after step; all ranks make it and make the same calls.

    A replica's gradients are of the mean of its losses, as if it had ``num_microbatches / data`` of them.

    Args:
        model: The user's model, with what is on this rank.
        split: Where it can be cut.
        partition: Chunks on places.
        grid: All ranks.

    Attributes:
        counted_elsewhere: Ids of this rank's parameters that an earlier rank holds, too.
    """

    def __init__(self, model: nn.Module, split: ModelSplit, partition: Partition, grid: RankGrid) -> None:
        self._progress = grid.world.progress
        self._named, self._sparse = dict(model.named_parameters()), sparse_in(model)
        self.counted_elsewhere = {id(one) for one in self._named.values()} if grid.replica else set()
        shared = dict(split.shared_parameters([chunk.parts for chunk in partition.chunks]))
        self._chunks: dict[int, GradientReducer] = {}
        self._tied: list[_Tied] = []
        self._ready: set[int] = set()
        if grid.degrees.data > 1:
            groups = [grid.group_of([place]) for place in range(partition.num_ranks)]
            for index in reversed(range(len(partition.chunks))):
                names = split.parameters_of(partition.chunks[index].parts) - shared.keys()
                if partition.chunks[index].rank == grid.place and any(self._named[n].requires_grad for n in names):
                    self._chunks[index] = self._reducer(names, groups[grid.place])
        for name, chunks in shared.items():
            places = sorted({partition.chunks[index].rank for index in chunks})
            if len(places) > 1 or grid.degrees.data > 1:
                self._tie(name, places, grid)

    def begin(self) -> None:
        """Before a step: puts aside what earlier steps have summed of tied weights."""
        for tied in self._tied:
            tied.begin()

    def start(self, chunk: int) -> None:
        """Begins to sum a chunk's gradients, all of which are there."""
        self._ready.add(chunk)
        for index, reducer in self._chunks.items():
            if index not in self._ready:
                return
            reducer.start_rest()

    def finish(self) -> None:
        """After a step: sums what is left, and waits."""
        for reducer in self._chunks.values():
            reducer.start_rest()
        for tied in self._tied:
            tied.reducer.start_rest()
        for reducer in self._chunks.values():
            reducer.finish()
        for tied in self._tied:
            tied.finish()
        self._ready.clear()

    def _tie(self, name: str, places: list[int], grid: RankGrid) -> None:
        group, parameter = grid.group_of(places), self._named[name]
        if group is None or not parameter.requires_grad:
            return
        self._tied.append(_Tied(parameter=parameter, reducer=self._reducer([name], group), num_places=len(places)))
        if grid.place != places[0]:
            self.counted_elsewhere.add(id(parameter))

    def _reducer(self, names: Collection[str], group: dist.ProcessGroup | None) -> GradientReducer:
        assert group is not None  # this rank is in it
        return GradientReducer(
            [one for name, one in self._named.items() if name in names],
            group,
            overlaps=False,  # begun by the schedule
            waiting=lambda phase: self._progress.waiting(THE_LOOP, phase),
            sparse=self._sparse,
        )
