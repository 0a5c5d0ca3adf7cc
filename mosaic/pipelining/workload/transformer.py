"""Transformers in pipelines: tables of layers, timed by SEMU from closed formulas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from mosaic.context import share_items
from mosaic.cost.counts import Operator
from mosaic.pipelining.semu.rank_hardware import RankHardware
from mosaic.pipelining.workload.formulas import (
    StepWriter,
    source_bytes,
    write_first,
    write_gathered,
    write_head,
    write_projector,
)
from mosaic.pipelining.workload.intake import Intake
from mosaic.pipelining.workload.layer_graphs import LayerSteps, timed_layer
from mosaic.pipelining.workload.layer_steps import ITEM_BYTES, Fetched, ModuleLoad
from mosaic.pipelining.workload.layers import Layer
from mosaic.pipelining.workload.microbatch import Microbatch
from mosaic.pipelining.workload.sequence_share import PLAIN_SHARING, ContextSharing
from mosaic.pipelining.workload.shapes import TransformerShape

MAX_LOADS = 2000
"""Most loads whose layers a module caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerModule:
    """A transformer on the ranks of a machine; a ``LayeredModule``.

    The first layer includes the steps before it, and the last one a head with its loss. The last layer also includes a
    projector, except behind frozen layers: there it trains, and is a last layer of its own.

    Raises:
        ValueError: The tensor degree does not divide the heads, or a head has no vocabulary.
    """

    name: str
    """Name in the graph."""
    shape: TransformerShape
    """Its layers."""
    machine: RankHardware
    """One of its ranks."""
    intake: Intake
    is_frozen: bool = False
    """True if its weights except a projector do not train."""
    has_head: bool = False
    """True if it ends in a head over its vocabulary and a loss."""
    projects_to: int = 0
    """Output width of its projector; 0: none."""
    sharing: ContextSharing = PLAIN_SHARING
    """Sharing of its inputs over the context ranks."""
    _known: dict[ModuleLoad, tuple[Layer, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensor = self.machine.degrees.tensor
        if self.shape.heads % tensor:
            raise ValueError(
                f"{self.name}: {self.shape.heads} heads do not divide by tensor={tensor}; use a divisor of the heads"
            )
        if self.has_head and not self.shape.vocabulary:
            raise ValueError(f"{self.name}: a head needs a vocabulary; give its shape one")

    @property
    def trains(self) -> tuple[bool, ...]:
        """True for each layer whose weights train."""
        own = (not self.is_frozen,) * self.shape.layers
        return (*own, True) if self._projects_apart else own

    def num_parameters(self, first: int, count: int) -> int:
        """Returns the parameters of these layers, of all tensor-parallel ranks together."""
        return sum(self._parameters(layer) for layer in range(first, first + count))

    def state_bytes(self, first: int, count: int) -> int:
        """Returns the constant bytes of these layers on a rank.

        Weights in bfloat16, 2 bytes each; if they train also a gradient in float32, 4, and the distributed
        optimizer's share of float32 weights and AdamW's moments, 12 over the data and context ranks (Megatron-LM,
        docs "distributed optimizer": 6 + 12 / d bytes).
        """
        degrees = self.machine.degrees
        total = 0.0
        for layer in range(first, first + count):
            per = ITEM_BYTES + (4 + 12 / (degrees.data * degrees.context) if self.trains[layer] else 0)
            total += self._parameters(layer, with_copies=True) / degrees.tensor * per
        return round(total)

    def units(self, microbatch: Microbatch) -> int:
        """Returns the most pieces of a microbatch here."""
        return self.intake.units(microbatch)

    def layers(self, microbatch: Microbatch, units: int) -> tuple[Layer, ...]:
        """Returns all layers with ``units`` of a microbatch's units."""
        load = self.intake.load(microbatch, units)
        known = self._known.get(load)
        if known is None:
            if len(self._known) >= MAX_LOADS:
                self._known.clear()
            known = self._known[load] = self._timed(load)
        return known

    def boundary_bytes(self, microbatch: Microbatch, units: int) -> int:
        """Returns the bytes between two of its layers on one rank; its output counts the same."""
        return self.writer(microbatch, units).own_bytes

    def output_bytes(self, microbatch: Microbatch, units: int) -> int:
        """Returns the bytes that leave one rank; each context rank sends the gathered output."""
        load = self.intake.load(microbatch, units)
        writer = self._writer(load)
        return self._gathered_bytes(writer) if self._is_gathered(load) else writer.own_bytes

    def forward_flops(self, microbatch: Microbatch, units: int) -> int:
        """Returns the operations of forward without repetition over ranks; a step has three times as many."""
        degrees = dataclasses.replace(self.machine.degrees, context=1)
        whole = dataclasses.replace(self, machine=dataclasses.replace(self.machine, degrees=degrees))
        steps = (step for layer in whole._layer_steps(self.intake.load(microbatch, units)) for step in layer.steps)
        return sum(step.forward.flops for step in steps if isinstance(step.forward, Operator)) * degrees.tensor

    def writer(self, microbatch: Microbatch, units: int) -> StepWriter:
        """Returns the writer of one rank's steps, without any step."""
        return self._writer(self.intake.load(microbatch, units))

    def fetched(self, microbatch: Microbatch, units: int) -> Fetched | None:
        """Returns the keys and values that one layer's attention fetches from other ranks, if any."""
        steps = self._layer_steps(self.intake.load(microbatch, units))[0].steps
        return next((step.fetched for step in steps if step.fetched is not None), None)

    def on_share(self, share: float) -> TransformerModule:
        """Returns the module on a share of its ranks' SMs."""
        return dataclasses.replace(self, machine=dataclasses.replace(self.machine, share=share))

    @property
    def _projects_apart(self) -> bool:
        return bool(self.projects_to) and self.is_frozen

    def _parameters(self, layer: int, *, with_copies: bool = False) -> int:
        shape, last = self.shape, self.shape.layers - 1
        if layer > last:
            return self._projector_parameters
        count = shape.layer_parameters + (shape.first_parameters if layer == 0 else 0)
        if layer == last:
            count += 0 if self._projects_apart else self._projector_parameters
            if self.has_head:
                copied = with_copies and layer > 0
                count += shape.vocabulary * shape.hidden if copied else shape.head_parameters
        return count

    @property
    def _projector_parameters(self) -> int:
        return self.shape.hidden * self.intake.merges * self.projects_to

    def _writer(self, load: ModuleLoad) -> StepWriter:
        degrees, ranks = self.machine.degrees, self.machine.degrees.context
        if self.projects_to and self.sharing.items != "split":
            if self.sharing.items == "share" and load.sequences >= ranks:
                most = share_items([load.tokens] * load.sequences, ranks).room // load.tokens
                load = dataclasses.replace(load, sequences=most)
            degrees = dataclasses.replace(degrees, context=1)
        return StepWriter(shape=self.shape, degrees=degrees, load=load, sharing=self.sharing)

    def _is_gathered(self, load: ModuleLoad) -> bool:
        """Returns True if its output is split over the context ranks, and its reader needs all."""
        if self.machine.degrees.context == 1 or not self.projects_to:
            return False
        writer = self._writer(load)
        return writer.degrees.context > 1 or writer.load.sequences < load.sequences

    def _steps(self, load: ModuleLoad, *, first: bool, last: bool) -> LayerSteps:
        writer = self._writer(load)
        output = writer.layer(write_first(writer) if first else "x")
        if last and self.has_head:
            output = write_head(writer, output)
        elif last and self.projects_to and not self._projects_apart:
            output = self._projected(writer, output, load)
        return self._as_steps(writer, output, trains=not self.is_frozen)

    def _projector(self, load: ModuleLoad) -> LayerSteps:
        writer = self._writer(load)
        return self._as_steps(writer, self._projected(writer, "x", load), trains=True)

    def _projected(self, writer: StepWriter, source: str, load: ModuleLoad) -> str:
        output = write_projector(writer, source, self.projects_to)
        return write_gathered(writer, output, self._gathered_bytes(writer)) if self._is_gathered(load) else output

    def _gathered_bytes(self, writer: StepWriter) -> int:
        return self.machine.degrees.context * writer.output_rows * self.projects_to * ITEM_BYTES

    def _as_steps(self, writer: StepWriter, output: str, *, trains: bool) -> LayerSteps:
        return LayerSteps(steps=tuple(writer.steps), sources=source_bytes(writer), output=output, trains=trains)

    def _layer_steps(self, load: ModuleLoad) -> tuple[LayerSteps, ...]:
        """Returns all layers; those in the middle are one object."""
        count = self.shape.layers
        if count == 1:
            layers: tuple[LayerSteps, ...] = (self._steps(load, first=True, last=True),)
        else:
            middle = self._steps(load, first=False, last=False)
            ends = self._steps(load, first=True, last=False), self._steps(load, first=False, last=True)
            layers = (ends[0], *(middle,) * (count - 2), ends[1])
        return (*layers, self._projector(load)) if self._projects_apart else layers

    def _timed(self, load: ModuleLoad) -> tuple[Layer, ...]:
        timed: dict[int, Layer] = {}
        layers = self._layer_steps(load)
        for layer in layers:
            if id(layer) not in timed:
                timed[id(layer)] = timed_layer(layer, self.machine)
        return tuple(timed[id(layer)] for layer in layers)
