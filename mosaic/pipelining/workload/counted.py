"""Modules of the user's own model: a microbatch brings its layers' times and bytes, counted for its shapes.

Shapes of one model are too many for a table made beforehand; what a step's microbatches need is counted when their
shapes are seen, and goes with them to wherever the step is planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mosaic.pipelining.workload.layers import Layer
from mosaic.pipelining.workload.microbatch import Microbatch
from mosaic.pipelining.workload.phase_fit import AS_COUNTED, ModuleFit

IN_PROPORTION = 1.0
"""Of a module whose speed is its share's, which is how lanes are planned before they are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedLayers:
    """What a microbatch is to one module."""

    units: int
    """Pieces at most."""
    layers: tuple[Layer, ...]
    """With all units."""
    boundary_bytes: int
    """Between two layers and of the output, with all units."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountedMicrobatch(Microbatch):
    """A microbatch with what was counted for its shapes; two of one key are the same to planning."""

    key: str
    """Its shapes, as text."""
    counted: Mapping[str, CountedLayers] = field(repr=False)
    """By module; those that it skips are left out."""
    draws: bool = False
    """Whether it draws random numbers: encoders then have one piece of it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountedMicrobatch) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedModule:
    """A module of the user's model; a ``LayeredModule`` of ``CountedMicrobatch``.

    Raises:
        ValueError: Its lists differ in length.
    """

    name: str
    """In the split."""
    trains: tuple[bool, ...]
    """For each layer whether its weights, or some of them, train."""
    parameters: tuple[int, ...]
    """Of each layer, prologue and epilogue with the first and the last."""
    resident_bytes: tuple[int, ...]
    """Of each layer: weights, and gradients and optimizer's state of what trains."""
    fit: ModuleFit = AS_COUNTED
    """What measured steps say about counted times, where backward is one task."""
    fit_apart: ModuleFit | None = None
    """The same where backward for weights is a task of its own; None: as ``fit``."""
    share_exponent: float = IN_PROPORTION
    """On a share s of its rank, beside what runs there, it takes ``s ** -share_exponent`` times as long: 0 if the rest
    of the rank is of no use to it, above 1 where others disturb it, too."""

    def __post_init__(self) -> None:
        if len({len(self.trains), len(self.parameters), len(self.resident_bytes)}) > 1:
            raise ValueError(f"{self.name}: lists of {len(self.trains)} layers differ in length; give each layer one")

    def num_parameters(self, first: int, count: int) -> int:
        """Returns the parameters of these layers."""
        return sum(self.parameters[first : first + count])

    def state_bytes(self, first: int, count: int) -> int:
        """Returns what stays on a rank for these layers."""
        return sum(self.resident_bytes[first : first + count])

    def units(self, microbatch: Microbatch) -> int:
        """Returns how many pieces at most a microbatch has here; 0: it is skipped."""
        found = self._of(microbatch)
        return 0 if found is None else found.units

    def layers(self, microbatch: Microbatch, units: int) -> tuple[Layer, ...]:
        """Returns all layers with some of a microbatch's units: in proportion to them."""
        found = self._of(microbatch)
        assert found is not None  # there are units
        share = units / found.units
        return self.fit.layers(tuple(scaled_layer(one, share) for one in found.layers))

    def on_share(self, share: float) -> CountedModule:
        """Returns the module as it is on a share of its rank."""
        slower = share**-self.share_exponent
        apart = None if self.fit_apart is None else self.fit_apart.slower(slower)
        return replace(self, fit=self.fit.slower(slower), fit_apart=apart)

    def with_weights_apart(self) -> CountedModule:
        """Returns the module as it is where backward for weights is a task of its own."""
        return self if self.fit_apart is None else replace(self, fit=self.fit_apart)

    def boundary_bytes(self, microbatch: Microbatch, units: int) -> int:
        """Returns the bytes between two layers."""
        found = self._of(microbatch)
        return 0 if found is None else found.boundary_bytes * units // found.units

    def _of(self, microbatch: Microbatch) -> CountedLayers | None:
        if not isinstance(microbatch, CountedMicrobatch):
            raise ValueError(f"{self.name} needs what was counted for a microbatch, and {microbatch} has nothing of it")
        return microbatch.counted.get(self.name)


def scaled_layer(layer: Layer, share: float) -> Layer:
    """Returns a layer with a share of the data."""
    if share == 1:
        return layer
    return replace(
        layer,
        forward_ms=layer.forward_ms * share,
        backward_ms=layer.backward_ms * share,
        weights_ms=layer.weights_ms * share,
        workspace_bytes=round(layer.workspace_bytes * share),
        strategies=tuple(
            replace(
                one,
                kept_bytes=round(one.kept_bytes * share),
                extra_forward_ms=one.extra_forward_ms * share,
                extra_backward_ms=one.extra_backward_ms * share,
            )
            for one in layer.strategies
        ),
    )
