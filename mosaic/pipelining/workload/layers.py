"""Modules of a pipeline as lists of layers, each with its times and bytes for so much data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mosaic.pipelining.workload.microbatch import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to treat a layer's activations between forward and backward (PipeWeaver, section 6.3)."""

    name: str
    """``keep`` or ``recompute``: what ranks do (``mosaic.parts.strategies``)."""
    kept_bytes: int
    """On the device from the end of forward to the end of backward."""
    extra_forward_ms: float = 0.0
    """What it adds to forward."""
    extra_backward_ms: float = 0.0
    """What it adds to backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer with a piece of a microbatch, on one rank of each axis."""

    forward_ms: float
    """Forward, its collectives included."""
    backward_ms: float
    """Backward for its inputs."""
    weights_ms: float
    """Backward for its weights; counts only where it trains."""
    strategies: tuple[Strategy, ...]
    """What may become of its activations; the first is ``keep``."""
    workspace_bytes: int = 0
    """In use while it runs, above what it keeps."""


class LayeredModule(Protocol):
    """A module that pipelines cut between layers."""

    @property
    def name(self) -> str:
        """Its name in the graph."""

    @property
    def trains(self) -> tuple[bool, ...]:
        """For each layer whether its weights train."""

    def num_parameters(self, first: int, count: int) -> int:
        """Returns the parameters of these layers, frozen or not, tensor-parallel ranks together."""

    def state_bytes(self, first: int, count: int) -> int:
        """Returns what stays on a rank: weights, and gradients and optimizer's state where they train."""

    def units(self, microbatch: Microbatch) -> int:
        """Returns how many pieces a microbatch has at most: images, clips, 1 of packed text; 0: it is skipped."""

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
    """Modules and which feeds which, in an order in which none feeds an earlier one."""

    modules: tuple[LayeredModule, ...]
    """Encoders before the backbone, the backbone before decoders."""
    feeds: tuple[Feed, ...] = ()
    """Edges."""
