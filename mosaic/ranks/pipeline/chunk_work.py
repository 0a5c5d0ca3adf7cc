"""Computation of a rank's chunks in a step: forwards, backwards and gradients of the user's own model.

Lanes of the rank may call it at the same time. There is one generator of random numbers, so forwards that draw take
turns, with each other and with backwards that recompute activations: those restore the generator's state while they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mosaic.context.items import ItemShare
from mosaic.errors import UnsplittableError, said_by
from mosaic.find.random_numbers import RandomState, forked, torch_state
from mosaic.parts.offload import Offload
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.pieces import count_units, join_pieces, take_units
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.layers import Layer
from mosaic.pipelining.partition import Partition, even_pieces, strategy_of
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.pipelining.tasks import ActionKind
from mosaic.ranks.pipeline.executor import Edge, RankTask
from mosaic.ranks.pipeline.sequences import SharedItems
from mosaic.ranks.pipeline.transport import Tensors, TensorSpec

Microbatches = Sequence[Mapping[str, Any]]
"""Keyword arguments of the model; the same on every rank."""
Loss = Callable[[Any, Mapping[str, Any]], Tensor]
"""Returns a scalar from the model's output and the microbatch."""
Scale = Callable[[Tensor], Tensor]
"""Scales a loss before its backward, as ``GradScaler.scale``."""


@dataclass(frozen=True, kw_only=True)
class StepData:
    """One step: its microbatches as chunks need them, by its schedule."""

    split: ModelSplit
    partition: Partition
    schedule: PipelineSchedule
    microbatches: Microbatches
    layers: Mapping[str, Sequence[Layer]] = field(default_factory=dict)
    """Layers of each module, whose strategies the schedule names by index."""
    averaged_over: float
    """Divisor of losses: the step's microbatches for each of the ranks that have the same layers."""
    units_together: int = 1
    items: SharedItems | None = None
    """Shares units of encoders out over context ranks; None: each rank encodes all."""
    _pieces: dict[TaskName, Mapping[str, Any]] = field(default_factory=dict)
    _own: dict[TaskName, tuple[Mapping[str, Any], ItemShare | None]] = field(default_factory=dict)

    def kwargs_of(self, task: TaskName) -> Mapping[str, Any]:
        return self._own_of(task)[0]

    def leaving_kwargs_of(self, task: TaskName) -> Mapping[str, Any]:
        """Returns those that fix the shapes of a forward's outputs: behind an encoder, its units on all ranks."""
        _, is_last = self._encoder_of(task)
        return self._piece_of(task) if is_last else self.kwargs_of(task)

    def gathered(self, task: TaskName, sent: Mapping[str, Tensors]) -> Mapping[str, Tensors]:
        """Returns the outputs of a forward with the units that other context ranks have encoded."""
        module, is_last = self._encoder_of(task)
        _, share = self._own_of(task)
        if self.items is None or share is None or not is_last:
            return sent
        return {**sent, module: self.items.gathered(sent[module], self._piece_of(task), module, share)}

    def carried(self, edge: Edge) -> tuple[str, ...]:
        """Returns the modules whose tensors cross an edge, in order."""
        present, chunks = self._present[edge.source.microbatch], self.partition.chunks
        return self.split.handed(
            *([part for part in chunks[end.chunk].parts if part.module in present] for end in edge)
        )

    def ends(self, task: TaskName) -> bool:
        parts = self.partition.chunks[task.chunk].parts
        return parts[-1].module == self.split.modules[-1].name and parts[-1].end == parts[-1].total

    def is_cut(self, task: TaskName) -> bool:
        """Returns whether a forward has only some units of its microbatch."""
        return self.kwargs_of(task) is not self.microbatches[task.microbatch]

    def strategies_of(self, task: TaskName) -> tuple[str, ...]:
        """Returns the activation strategy of each layer of a forward; empty where all keep."""
        chosen, default = self.schedule.strategies.get(str(task)), self.schedule.strategy
        if chosen is None and default == "keep":
            return ()
        names: list[str] = []
        for part in self.partition.chunks[task.chunk].parts:
            for layer in self.layers[part.module][part.first : part.end]:
                index = 0 if chosen is None or len(names) >= len(chosen) else chosen[len(names)]
                names.append(strategy_of(layer, default).name if chosen is None else layer.strategies[index].name)
        return tuple(names)

    def next_backward(self, task: TaskName) -> TaskName | None:
        """Returns the backward that a lane runs after this one, if any."""
        following = self._next_backwards.get(str(task))
        return None if following is None else TaskName.parse(following)

    @cached_property
    def _next_backwards(self) -> Mapping[str, str]:
        rows = ([cell for cell in row if "B" in cell and cell[-1] != ")"] for row in self.schedule.rows)
        return dict(pair for row in rows for pair in pairwise(row))

    @cached_property
    def _later_pieces(self) -> frozenset[str]:
        """Tasks of all pieces but the first."""
        return frozenset(cell for row in self.schedule.rows for cell in row if "." in cell and cell[-1] != ")")

    @cached_property
    def _present(self) -> tuple[frozenset[str], ...]:
        return tuple(map(self.split.present, self.microbatches))

    @cached_property
    def _encoders_apart(self) -> frozenset[str]:
        """Encoders that share no chunk with other modules."""
        mixed = {part.module for chunk in self.partition.chunks if len(chunk.parts) > 1 for part in chunk.parts}
        return self.split.encoders - mixed

    def _encoder_of(self, task: TaskName) -> tuple[str, bool]:
        """Returns the encoder of a chunk and whether the chunk ends it; an empty name for other chunks."""
        part = self.partition.chunks[task.chunk].parts[0]
        return (part.module, part.end == part.total) if part.module in self._encoders_apart else ("", False)

    def _piece_of(self, task: TaskName) -> Mapping[str, Any]:
        if task not in self._pieces:
            self._pieces[task] = self._cut(task)
        return self._pieces[task]

    def _own_of(self, task: TaskName) -> tuple[Mapping[str, Any], ItemShare | None]:
        if task not in self._own:
            kwargs, (module, _) = self._piece_of(task), self._encoder_of(task)
            share = self.items.share_of(kwargs, module) if self.items is not None and module else None
            own = kwargs if share is None or self.items is None else self.items.own(kwargs, module, share)
            self._own[task] = own, share
        return self._own[task]

    def _cut(self, task: TaskName) -> Mapping[str, Any]:
        kwargs = self.microbatches[task.microbatch]
        name, _ = self._encoder_of(task)
        size = self.partition.sizes.get(name)
        if size is None or f"{task.chunk}F{task.microbatch}.1" not in self._later_pieces:
            return kwargs
        units, together = count_units(self.split, kwargs, name), self.units_together
        pieces = even_pieces(max(1, units // together), size)
        first = sum(pieces[: task.piece]) * together
        is_last = task.piece == len(pieces) - 1
        end = units if is_last else first + pieces[task.piece] * together
        return take_units(self.split, kwargs, name, range(first, end))


def checked_loss(loss: Loss, output: Any, kwargs: Mapping[str, Any], model: PartedModel) -> Tensor:
    """Computes a loss; refuses one that draws random numbers, or trains a tensor that is no parameter of the model."""
    before = torch_state(model.device)
    try:
        value = loss(output, kwargs)
    except Exception as error:  # of any kind: it is the user's code that runs
        if "NoneType" not in str(error):
            raise
        raise UnsplittableError(
            f"the loss raises {said_by(error)}; outputs of other ranks that it did not read with the sample are None: "
            "let it read them there"
        ) from error
    if not before.is_same(torch_state(model.device)):
        raise UnsplittableError(
            "the loss draws random numbers, which ranks without the last layer do not; draw them in the model, or in "
            "the loop, and give them with the microbatch"
        )
    trained = list(_trained(value, until=output))
    parameters = {id(parameter) for parameter in model.model.parameters()} if trained else ()
    other = next((leaf for leaf in trained if id(leaf) not in parameters), None)
    if other is not None:
        raise UnsplittableError(
            f"the loss trains a tensor of shape {tuple(other.shape)} that is no parameter of the model; ranks without "
            "the last layer would not see its gradient: make the model compute with it"
        )
    return value


def _trained(loss: Tensor, *, until: Any) -> Iterator[Tensor]:
    """Yields the leaves that get a gradient of a loss otherwise than through the model's output."""
    seen = {leaf.grad_fn for leaf in pytree.tree_leaves(until) if isinstance(leaf, Tensor)}
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        left += [before for before, _ in node.next_functions]


class ChunkWork:
    """Computes the tasks of one rank in one step; see ``Work``.

    Args:
        states: Of the generators before each microbatch of the plain loop; None for one that draws none.
        turn: A lock that ranks which are threads of one process share, as they share its generators.
    """

    def __init__(
        self,
        model: PartedModel,
        loss: Loss,
        data: StepData,
        *,
        states: Sequence[RandomState | None],
        scale: Scale | None = None,
        reduce: Callable[[int], None] | None = None,
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._model, self._loss, self._data = model, loss, data
        self._states, self._scale, self._reduce = states, scale, reduce
        self._turn: AbstractContextManager[Any] = (turn or threading.RLock()) if any(states) else nullcontext()
        self._kept: dict[TaskName, tuple[Mapping[TaskName, Tensors], Mapping[str, Tensors]]] = {}
        """Inputs by source and outputs by module of each forward until its backward; at the model's end the loss."""
        self._offloads: dict[TaskName, Offload] = {}
        """Of each forward with activations in the host's memory, until its backward."""
        self.losses: dict[int, Tensor] = {}

    def forward(self, task: RankTask, inputs: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        """Returns the inputs of each forward that this one feeds; nothing where the model ends."""
        data, name = self._data, task.name
        kwargs = data.kwargs_of(name)
        leaves = {
            source: tuple(_leaf(tensor, needs_grad=source in task.wanted) for tensor in tensors)
            for source, tensors in inputs.items()
        }
        with self._turn:  # shapes of boundaries are found with the generator's state restored, too
            received = self._received(name, leaves)
        with torch.set_grad_enabled(task.has_backward):
            result = self._run(name, kwargs, received)
        if data.ends(name):
            with self._turn, self._model.computing():
                loss = checked_loss(self._loss, result, kwargs, self._model)
            self.losses[name.microbatch] = loss.detach()
            mean = loss / data.averaged_over
            outputs: Mapping[str, Tensors] = {"": (mean if self._scale is None else self._scale(mean),)}
        else:
            with torch.set_grad_enabled(task.has_backward):
                outputs = data.gathered(name, result)
        if task.has_backward:
            self._kept[name] = {source: leaves[source] for source in task.wanted}, outputs
        return {
            target: tuple(tensor.detach() for module in data.carried(Edge(name, target)) for tensor in outputs[module])
            for target in task.targets
        }

    def backward(self, task: RankTask, gradients: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        """Adds gradients of weights; returns those of the inputs, for each backward that takes one."""
        forward = task.name.forward
        inputs, outputs = self._kept.pop(forward)
        self._offloads.pop(forward, None)
        following = self._data.next_backward(task.name) if self._offloads else None
        if following is not None and following.forward in self._offloads:
            self._offloads[following.forward].prefetch()
        with self._turn if self._data.strategies_of(forward) else nullcontext():
            if self._data.ends(forward):
                torch.autograd.backward(outputs[""])
            else:
                torch.autograd.backward(*self._due(forward, outputs, gradients))
        return {
            target: tuple(
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for leaf in inputs[target.forward]
                if may_train(leaf)
            )
            for target in task.targets
        }

    def free(self, task: TaskName) -> None:
        self._kept.pop(task, None)
        self._offloads.pop(task, None)

    def reduce(self, chunk: int) -> None:
        if self._reduce is not None:
            self._reduce(chunk)

    def specs(self, edge: Edge) -> tuple[TensorSpec, ...]:
        is_back = edge.source.kind is not ActionKind.FORWARD
        ends = Edge(edge.target.forward, edge.source.forward) if is_back else edge
        kwargs = self._data.leaving_kwargs_of(ends.source)
        with self._turn:
            likes = self._model.boundary_like(ends.source.chunk, kwargs)
        own = (like for name in self._data.carried(ends) for like in likes[name])
        return tuple(TensorSpec.of(like) for like in own if not is_back or may_train(like))

    def _run(self, task: TaskName, kwargs: Mapping[str, Any], received: dict[str, Tensors]) -> Any:
        state, strategies = self._states[task.microbatch], self._data.strategies_of(task)
        offload = None
        if "offload" in strategies and torch.is_grad_enabled():
            offload = self._offloads[task] = self._model.new_offload()
        forward = partial(self._model.forward, task.chunk, kwargs, received, strategies, offload=offload)
        if state is None:
            return forward(draws="none")
        assert not self._data.is_cut(task)  # pieces would draw other numbers: plans have none of such microbatches
        with self._turn, forked(self._model.device):
            state.restore()  # of the plain loop before this microbatch
            return forward(draws="all")

    def _received(self, task: TaskName, leaves: Mapping[TaskName, Tensors]) -> dict[str, Tensors]:
        """Returns the inputs by module, pieces joined in order."""
        pieces: dict[str, list[tuple[int, Tensors]]] = {}
        for source, tensors in leaves.items():
            likes = self._model.boundary_like(source.chunk, self._data.kwargs_of(source))
            at = 0
            for name in self._data.carried(Edge(source, task)):
                pieces.setdefault(name, []).append((source.piece, tensors[at : at + len(likes[name])]))
                at += len(likes[name])
        return {
            name: join_pieces([tensors for _, tensors in sorted(own, key=lambda pair: pair[0])])
            for name, own in pieces.items()
        }

    def _due(
        self, forward: TaskName, outputs: Mapping[str, Tensors], gradients: Mapping[TaskName, Tensors]
    ) -> tuple[Tensors, Tensors]:
        """Returns the outputs that have a gradient, and for each the sum of its readers' gradients."""
        sums: dict[tuple[str, int], Tensor] = {}
        for reader, own in gradients.items():
            names = self._data.carried(Edge(forward, reader.forward))
            places = [(name, at) for name in names for at, out in enumerate(outputs[name]) if may_train(out)]
            for place, gradient in zip(places, own, strict=True):
                sums[place] = sums[place] + gradient if place in sums else gradient
        due = {place: grad for place, grad in sums.items() if outputs[place[0]][place[1]].requires_grad}
        return tuple(outputs[name][at] for name, at in due), tuple(due.values())


def _leaf(tensor: Tensor, *, needs_grad: bool) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if needs_grad and may_train(leaf) else leaf


def may_train(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
