"""Modules of a pipeline as lists of layers, with times and bytes by amount of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mosaic.pipelining.workload.microbatch import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to treat a layer's activations between forward and backward (PipeWeaver, section 6.3)."""

    name: str
    """``keep`` or ``recompute``; see ``mosaic.parts.strategies``."""
    kept_bytes: int
    """Bytes from the end of forward to the end of backward."""
    extra_forward_ms: float = 0.0
    """Added time of forward."""
    extra_backward_ms: float = 0.0
    """Added time of backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer with a piece of a microbatch, on one rank of each axis."""

    forward_ms: float
    """Forward, including its collectives."""
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
        """Returns the bytes between two of its layers, and of its output, on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """``source``'s output is an input of ``target``."""

    source: str
    """Name of a module."""
    target: str
    """Name of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """Modules in topological order, with their edges."""

    modules: tuple[LayeredModule, ...]
    """Encoders before the backbone, the backbone before decoders."""
    feeds: tuple[Feed, ...] = ()
    """Edges."""
