"""A step's microbatches as a rank's chunks need them: pieces, what crosses edges, which gradients are wanted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mosaic.context.items import ItemShare
from mosaic.parts.pieces import count_units, slice_piece
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.layers import Layer
from mosaic.pipelining.partition import Partition, even_pieces
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.pipelining.tasks import ActionKind
from mosaic.ranks.pipeline.context.sequences import SharedItems
from mosaic.ranks.pipeline.executing.program import Edge
from mosaic.ranks.pipeline.transports.transport import Tensors


@dataclass(frozen=True, kw_only=True)
class StepData:
    """One step: its microbatches, and what its schedule says about them."""

    split: ModelSplit
    """Where the model is cut."""
    partition: Partition
    """Chunks on ranks."""
    schedule: PipelineSchedule
    """Of this step."""
    microbatches: Sequence[Mapping[str, Any]]
    """What the model is called with."""
    layers: Mapping[str, Sequence[Layer]] = field(default_factory=dict)
    """For a module its layers, whose strategies the schedule counts."""
    averaged_over: float
    """What losses are divided by: the step's microbatches for each of the ranks that have the same layers."""
    units_together: int = 1
    """Of an encoder, that no piece divides."""
    items: SharedItems | None = None
    """How encoders share units out over context ranks; None: each rank encodes all."""
    _pieces: dict[TaskName, Mapping[str, Any]] = field(default_factory=dict)
    _own: dict[TaskName, tuple[Mapping[str, Any], ItemShare | None]] = field(default_factory=dict)

    def kwargs_of(self, task: TaskName) -> Mapping[str, Any]:
        """Returns what the model is called with for a forward."""
        return self._own_of(task)[0]

    def leaving_kwargs_of(self, task: TaskName) -> Mapping[str, Any]:
        """Returns what the shapes of what leaves a forward follow from: behind an encoder, its units on all ranks."""
        _, is_last = self._encoder_of(task)
        return self._piece_of(task) if is_last else self.kwargs_of(task)

    def gathered(self, task: TaskName, sent: Mapping[str, Tensors]) -> Mapping[str, Tensors]:
        """Returns what leaves a forward with the units that other context ranks have encoded."""
        module, is_last = self._encoder_of(task)
        _, share = self._own_of(task)
        if self.items is None or share is None or not is_last:
            return sent
        return {**sent, module: self.items.gathered(sent[module], self._piece_of(task), module, share)}

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

    def _encoder_of(self, task: TaskName) -> tuple[str, bool]:
        """Returns the encoder of which a chunk has a part, and whether it is the last; an empty name for others."""
        part = self.partition.chunks[task.chunk].parts[0]
        return (part.module, part.end == part.total) if part.module in self._encoders_apart else ("", False)

    @cached_property
    def _encoders_apart(self) -> frozenset[str]:
        """Encoders that are in no chunk with others."""
        mixed = {part.module for chunk in self.partition.chunks if len(chunk.parts) > 1 for part in chunk.parts}
        return self.split.encoders - mixed

    def carried(self, edge: Edge) -> tuple[str, ...]:
        """Returns the modules whose tensors one forward hands to another, in order."""
        present, chunks = self._present[edge.source.microbatch], self.partition.chunks
        return self.split.handed(
            *([part for part in chunks[end.chunk].parts if part.module in present] for end in edge)
        )

    def ends(self, task: TaskName) -> bool:
        """Returns whether the model ends with a forward, which then has a loss."""
        parts = self.partition.chunks[task.chunk].parts
        return parts[-1].module == self.split.modules[-1].name and parts[-1].end == parts[-1].total

    @cached_property
    def targets(self) -> Mapping[TaskName, tuple[TaskName, ...]]:
        """For each forward those that it feeds."""
        found: defaultdict[TaskName, list[TaskName]] = defaultdict(list)
        for edge in self._edges:
            if edge.source.kind is edge.target.kind is ActionKind.FORWARD:
                found[edge.source].append(edge.target)
        return {source: tuple(targets) for source, targets in found.items()}

    @cached_property
    def wanted(self) -> Mapping[TaskName, Mapping[TaskName, TaskName]]:
        """For each forward those that feed it and want a gradient, each with the backward that takes it."""
        found: defaultdict[TaskName, dict[TaskName, TaskName]] = defaultdict(dict)
        for source, target in self._edges:
            if source.kind is target.kind is ActionKind.BACKWARD:
                reader = TaskName(source.chunk, ActionKind.FORWARD, source.microbatch, source.piece)
                feeds = TaskName(target.chunk, ActionKind.FORWARD, target.microbatch, target.piece)
                found[reader][feeds] = target
        return found

    @cached_property
    def backward_forwards(self) -> frozenset[TaskName]:
        """Forwards that have a backward."""
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        return frozenset(source for source, target in self._edges if (source.kind, target.kind) == kinds)

    @cached_property
    def apart(self) -> frozenset[TaskName]:
        """Forwards whose gradients of weights are tasks of their own."""
        return frozenset(
            TaskName(target.chunk, ActionKind.FORWARD, target.microbatch, target.piece)
            for _, target in self._edges
            if target.kind is ActionKind.WEIGHTS
        )

    @cached_property
    def strategies(self) -> Mapping[TaskName, tuple[str, ...]]:
        """For each forward what becomes of its layers' activations; those that keep all are left out."""
        found = {}
        if self.schedule.strategy != "keep":
            found = {task: self._named(task, None) for task in self._forwards}
        for text, chosen in self.schedule.strategies.items():
            task = TaskName.parse(text)
            found[task] = self._named(task, chosen)
        return found

    @cached_property
    def _edges(self) -> tuple[Edge, ...]:
        return tuple(Edge(*map(TaskName.parse, text.split(">"))) for text in self.schedule.edges)

    @cached_property
    def _forwards(self) -> tuple[TaskName, ...]:
        ends = (end for edge in self._edges for end in edge)
        return tuple(dict.fromkeys(end for end in ends if end.kind is ActionKind.FORWARD))

    @cached_property
    def _num_pieces(self) -> Counter[tuple[int, int]]:
        """For a chunk and a microbatch the pieces that it has in the schedule."""
        return Counter((task.chunk, task.microbatch) for task in self._forwards)

    @cached_property
    def _present(self) -> tuple[frozenset[str], ...]:
        return tuple(self.split.present(one) for one in self.microbatches)

    def _named(self, task: TaskName, chosen: Sequence[int] | None) -> tuple[str, ...]:
        names = []
        for part in self.partition.chunks[task.chunk].parts:
            for index in range(part.first, part.end):
                strategies = self.layers[part.module][index].strategies
                if chosen is None:
                    names.append(self.schedule.strategy)
                else:
                    names.append(strategies[chosen[len(names)] if len(names) < len(chosen) else 0].name)
        return tuple(names)

    def is_cut(self, task: TaskName) -> bool:
        """Returns whether a forward has some units of its microbatch alone."""
        return self.kwargs_of(task) is not self.microbatches[task.microbatch]

    def _cut(self, task: TaskName) -> Mapping[str, Any]:
        kwargs = self.microbatches[task.microbatch]
        name, _ = self._encoder_of(task)
        size = self.partition.sizes.get(name)
        if size is None:
            return kwargs
        if self._num_pieces[task.chunk, task.microbatch] == 1:
            return kwargs
        units, together = count_units(self.split, kwargs, name), self.units_together
        pieces = even_pieces(max(1, units // together), size)
        first = sum(pieces[: task.piece]) * together
        is_last = task.piece == len(pieces) - 1
        return slice_piece(self.split, kwargs, name, first, units - first if is_last else pieces[task.piece] * together)
