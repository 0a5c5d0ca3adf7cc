"""Gradients of weights that several ranks have: the mean over replicas, and the sum over those that each have a part.

Tied weights have parts of their gradients at several places, and weights between split modules on all tensor ranks.

A chunk's gradients are summed while the rest of the step runs, once its last backward has. Replicas end chunks in
orders of their own, and sums of one communicator have to begin in one order: the later chunk's first, as backwards end
in most schedules; one that is ready too early waits for its turn. Weights that several chunks use come at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mosaic.errors import ModuleContractError, UnsplittableError
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.partition import Partition
from mosaic.ranks.parameters.gradients import GradientReducer, refuse_sparse
from mosaic.ranks.pipeline.rank_grid import RankGrid
from mosaic.ranks.pipeline.tensor import WeightSlices
from mosaic.ranks.world.progress import THE_LOOP


@dataclass(slots=True, kw_only=True)
class _InParts:
    """Weights that have a part of their gradients on each of several ranks of a replica."""

    parameters: Sequence[nn.Parameter]
    reducer: GradientReducer
    num_parts: int
    before: Sequence[Tensor | None] = ()
    """Gradients of earlier steps, which are summed already."""

    def begin(self) -> None:
        self.before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Turns the mean over all holders into the sum over parts, and adds the earlier gradients."""
        self.reducer.finish()
        for parameter, before in zip(self.parameters, self.before, strict=True):
            if parameter.grad is not None:
                parameter.grad.mul_(self.num_parts)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self.before = ()


class GradientSums:
    """Sums this rank's gradients, step after step; all ranks make it and make the same calls.

    A replica's gradients are of the mean of its losses, as if it had ``num_microbatches / data`` of them. Ranks that
    share sequences count as replicas: each has its part of the losses, ``context`` times as large.
    """

    def __init__(
        self,
        model: nn.Module,
        split: ModelSplit,
        partition: Partition,
        grid: RankGrid,
        slices: WeightSlices | None = None,
    ) -> None:
        self._grid = grid
        refuse_sparse(model)
        self._named = dict(model.named_parameters())
        self._held = [
            (table, name, value, f"{path}.{name}" if path else name)
            for path, module in model.named_modules()
            for table in (module._parameters, module._modules)
            for name, value in table.items()
        ]
        self._trains = {name: parameter.requires_grad for name, parameter in self._named.items()}
        own = slices.names if slices is not None else frozenset()
        summed = slices.summed if slices is not None else frozenset()
        # ids of this rank's parameters that an earlier rank holds, too
        self.counted_elsewhere = {
            id(parameter)
            for name, parameter in self._named.items()
            if grid.replica or grid.context or (grid.tensor and name not in own)
        }
        tied = dict(split.shared_parameters([chunk.parts for chunk in partition.chunks]))
        self._chunks: dict[int, GradientReducer] = {}
        self._in_parts: list[_InParts] = []
        self._ready: dict[int, torch.cuda.Event | None] = {}
        self._starting = threading.Lock()
        is_shared = grid.num_copies > 1
        groups = [grid.group_of([place]) for place in range(partition.num_ranks)] if is_shared else []
        for index in reversed(range(len(partition.chunks))):
            chunk = partition.chunks[index]
            names = split.parameters_of(chunk.parts) - tied.keys()
            if groups and chunk.rank == grid.place and any(self._named[name].requires_grad for name in names - summed):
                self._chunks[index] = self._reducer(names - summed, groups[grid.place])
            self._add(names & summed, [chunk.rank], over_tensor=True)
        for name, chunks in tied.items():
            places = sorted({partition.chunks[index].rank for index in chunks})
            self._add({name}, places, over_tensor=name in summed)
            if grid.place != places[0]:
                self.counted_elsewhere.add(id(self._named[name]))
        # ids of parameters whose gradients come in parts, or as a mean over replicas
        self._summed = {id(self._named[name]) for name in (self._named if is_shared else tied)}

    def begin(self) -> None:
        """Saves the sums of earlier steps of tied weights; refuses a model that was changed since it was made."""
        for table, key, value, path in self._held:
            if table.get(key) is not value:
                raise ModuleContractError(
                    f"{path} is not what it was when the pipeline was made; copy values into the weights that are "
                    "there, as load_state_dict() does without assign=True, or change the model before mosaic.pipeline"
                )
        for name, parameter in self._named.items():
            if parameter.requires_grad != self._trains[name]:
                raise ModuleContractError(
                    f"{name}.requires_grad was {self._trains[name]} when the pipeline was made; freeze weights before "
                    "mosaic.pipeline, or make another one from a checkpoint"
                )
            if parameter._post_accumulate_grad_hooks or (parameter._backward_hooks and id(parameter) in self._summed):
                raise ModuleContractError(
                    f"{name} has a hook on its gradient, which would see a part of it, or change the weight before the "
                    "step's other microbatches have run; change gradients behind pipe.step()"
                )
        for part in self._in_parts:
            part.begin()

    def start(self, chunk: int) -> None:
        """Begins to sum a chunk's gradients, all of which are there; lanes may call it at the same time."""
        with self._starting:
            own = self._ready[chunk] = torch.cuda.Event() if self._grid.world.device.type == "cuda" else None
            if own is not None:
                own.record()  # on this lane's stream: another lane may begin the sum
            for index, reducer in self._chunks.items():
                if index not in self._ready:
                    return
                event = self._ready[index]
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)
                reducer.start_rest()

    def finish(self) -> None:
        """Sums the rest after a step, and waits."""
        for reducer in self._chunks.values():
            reducer.start_rest()
        for part in self._in_parts:
            part.reducer.start_rest()
        for reducer in self._chunks.values():
            reducer.finish()
        for part in self._in_parts:
            part.finish()
        self._ready.clear()

    def _add(self, names: Collection[str], places: list[int], *, over_tensor: bool) -> None:
        """Adds a sum of the gradients of weights over some places, and over their tensor ranks."""
        widths = {self._grid.degrees.widths[place] for place in places}
        if len(widths) > 1:
            raise UnsplittableError(
                f"{min(names)} is a weight of modules with {' and '.join(map(str, sorted(widths)))} tensor ranks, "
                "whose sums of its gradient differ; give these modules the same number"
            )
        num_parts = len(places) * (max(widths) if over_tensor else 1)
        if not names or num_parts * self._grid.num_copies == 1:
            return
        group = self._grid.group_of(places, over_tensor=over_tensor)
        parameters = [parameter for name, parameter in self._named.items() if name in names and parameter.requires_grad]
        if group is not None and parameters:
            reducer = self._reducer(names, group)
            self._in_parts.append(_InParts(parameters=parameters, reducer=reducer, num_parts=num_parts))

    def _reducer(self, names: Collection[str], group: dist.ProcessGroup | None) -> GradientReducer:
        assert group is not None  # this rank is in it
        return GradientReducer(
            [parameter for name, parameter in self._named.items() if name in names],
            group,
            overlaps=False,  # begun by the schedule
            waiting=lambda phase: self._grid.world.progress.waiting(THE_LOOP, phase),
        )
