"""Modules of a pipeline as lists of layers, with times and bytes by amount of data, and the content of microbatches.

The user's own model is counted: a table of all shapes would be too large, so the counts of a step's microbatches are
made for their shapes, and travel with them to the planner.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

Microbatch: TypeAlias = Hashable
"""Content of a microbatch, which its model's modules can read; equal ones have equal costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to treat a layer's activations between forward and backward (PipeWeaver, section 6.3)."""

    name: str
    """``keep``, ``recompute``, ``selective`` or ``offload``; see ``mosaic.parts.chunk_call``."""
    kept_bytes: int
    """Bytes from the end of forward to the end of backward."""
    extra_forward_ms: float = 0.0
    extra_backward_ms: float = 0.0
    workspace_bytes: int = 0
    """Bytes while the layer runs, above those of every strategy: of another layer, which is fetched meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer with a piece of a microbatch, on one rank of each axis."""

    forward_ms: float
    backward_ms: float
    """Backward for its inputs."""
    weights_ms: float
    """Backward for its weights; counts only if they train."""
    strategies: tuple[Strategy, ...]
    """Activation strategies; the first is ``keep``."""
    workspace_bytes: int = 0
    """Bytes while it runs, above the kept ones."""


class LayeredModule(Protocol):
    """A module that pipelines cut between layers."""

    @property
    def name(self) -> str:
        """Its name in the graph."""

    @property
    def trains(self) -> tuple[bool, ...]:
        """True for each layer whose weights train."""

    def num_parameters(self, first: int, count: int) -> int:
        """Returns the parameters of these layers, frozen or not, tensor-parallel ranks together."""

    def state_bytes(self, first: int, count: int) -> int:
        """Returns the constant bytes on a rank: weights, and gradients and optimizer state if they train."""

    def units(self, microbatch: Microbatch) -> int:
        """Returns the most pieces of a microbatch: images, clips, 1 of packed text; 0: it is skipped."""

    def layers(self, microbatch: Microbatch, units: int) -> tuple[Layer, ...]:
        """Returns all layers with ``units`` of a microbatch's units."""

    def boundary_bytes(self, microbatch: Microbatch, units: int) -> int:
        """Returns the bytes between two of its layers on one rank."""

    def output_bytes(self, microbatch: Microbatch, units: int) -> int:
        """Returns the bytes of its output on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """``source``'s output is an input of ``target``."""

    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """Modules in topological order, with their edges."""

    modules: tuple[LayeredModule, ...]
    """Encoders before the backbone, the backbone before decoders."""
    feeds: tuple[Feed, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFit:
    """Measured over counted times of a module's layers; by default as counted."""

    forward: float = 1.0
    """Forward, and what is recomputed of it."""
    backward: float = 1.0
    """Backward for inputs and for weights."""

    def layers(self, counted: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Returns all layers of the module with fitted times."""
        if self == AS_COUNTED:
            return counted
        by = self.backward
        return tuple(
            replace(
                scaled_layer(layer, self.forward, 1),
                backward_ms=by * layer.backward_ms,
                weights_ms=by * layer.weights_ms,
            )
            for layer in counted
        )


AS_COUNTED = ModuleFit()


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedLayers:
    units: int
    layers: tuple[Layer, ...]
    boundary_bytes: int
    """Between two layers and of the output, with all units."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountedMicrobatch:
    """A microbatch with the counts of its shapes; equal keys are equal to the planner."""

    key: str
    counted: Mapping[str, CountedLayers] = field(repr=False)
    """By module, without skipped ones."""
    draws: bool = False
    """True if it draws random numbers: encoders then have one piece."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountedMicrobatch) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedModule:
    """A module of the user's model; a ``LayeredModule`` of ``CountedMicrobatch``."""

    name: str
    trains: tuple[bool, ...]
    parameters: tuple[int, ...]
    """Number of each layer, including prologue and epilogue in the first and the last."""
    resident_bytes: tuple[int, ...]
    """Bytes of each layer: weights, and gradients and optimizer state if trained."""
    fit: ModuleFit = AS_COUNTED
    """Correction of counted times by measured steps."""

    def num_parameters(self, first: int, count: int) -> int:
        return sum(self.parameters[first : first + count])

    def state_bytes(self, first: int, count: int) -> int:
        return sum(self.resident_bytes[first : first + count])

    def units(self, microbatch: Microbatch) -> int:
        counts = self._of(microbatch)
        return 0 if counts is None else counts.units

    def layers(self, microbatch: Microbatch, units: int) -> tuple[Layer, ...]:
        """Returns all layers with some of a microbatch's units, in proportion to them."""
        counts = self._of(microbatch)
        assert counts is not None  # it has units
        share = units / counts.units
        return self.fit.layers(tuple(scaled_layer(layer, share) for layer in counts.layers))

    def boundary_bytes(self, microbatch: Microbatch, units: int) -> int:
        counts = self._of(microbatch)
        return 0 if counts is None else counts.boundary_bytes * units // counts.units

    output_bytes = boundary_bytes

    def _of(self, microbatch: Microbatch) -> CountedLayers | None:
        if not isinstance(microbatch, CountedMicrobatch):
            raise ValueError(f"{self.name} needs counts of its microbatches, and {microbatch} has none")
        return microbatch.counted.get(self.name)


def scaled_layer(layer: Layer, time: float, size: float | None = None) -> Layer:
    """Returns a layer with times by ``time`` and bytes by ``size``, by default the same factor."""
    size = time if size is None else size
    if time == size == 1:
        return layer
    return replace(
        layer,
        forward_ms=layer.forward_ms * time,
        backward_ms=layer.backward_ms * time,
        weights_ms=layer.weights_ms * time,
        workspace_bytes=round(layer.workspace_bytes * size),
        strategies=tuple(
            replace(
                strategy,
                kept_bytes=round(strategy.kept_bytes * size),
                extra_forward_ms=strategy.extra_forward_ms * time,
                extra_backward_ms=strategy.extra_backward_ms * time,
                workspace_bytes=round(strategy.workspace_bytes * size),
            )
            for strategy in layer.strategies
        ),
    )
