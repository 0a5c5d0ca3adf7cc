"""Layers from measurements instead of formulas: tables at some numbers of units, interpolated between them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

from mosaic.errors import InvalidProfileError
from mosaic.pipelining.workload.intake import Intake
from mosaic.pipelining.workload.layers import Layer, Strategy
from mosaic.pipelining.workload.microbatch import Microbatch
from mosaic.profile import Phase, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModule:
    """A module whose layers were measured; a ``LayeredModule``.

    Times and bytes between two measured numbers of units lie on the line between both. Outside there are none.

    Raises:
        InvalidProfileError: Nothing was measured, tables differ in their layers or strategies, or a figure is negative
            or not finite.
    """

    name: str
    """In the graph."""
    intake: Intake
    """What its units are."""
    trains: tuple[bool, ...]
    """For each layer whether its weights train."""
    tables: Mapping[int, tuple[Layer, ...]]
    """For each measured number of units its layers."""
    parameters: tuple[int, ...]
    """Of each layer."""
    resident_bytes: tuple[int, ...]
    """Of each layer: what stays on a rank."""
    unit_bytes: int
    """Of one unit between two layers."""

    def __post_init__(self) -> None:
        if not self.tables or not self.trains:
            raise InvalidProfileError(f"{self.name}: no layer was measured at any number of units; measure one")
        count = len(self.trains)
        names = {tuple(strategy.name for strategy in layer.strategies) for at in self.tables.values() for layer in at}
        lengths = {len(layers) for layers in self.tables.values()} | {len(self.parameters), len(self.resident_bytes)}
        if lengths != {count} or len(names) > 1:
            raise InvalidProfileError(
                f"{self.name}: tables of {sorted(lengths)} layers with {len(names)} lists of "
                f"strategies; give each {count} layers with the same strategies"
            )
        for units, layers in self.tables.items():
            if units < 1 or any(not 0 <= value < math.inf for layer in layers for value in _figures(layer)):
                raise InvalidProfileError(
                    f"{self.name}: a figure at {units} units is negative or not finite; measure it again"
                )

    def num_parameters(self, first: int, count: int) -> int:
        """Returns the parameters of these layers."""
        return sum(self.parameters[first : first + count])

    def state_bytes(self, first: int, count: int) -> int:
        """Returns what stays on a rank for these layers."""
        return sum(self.resident_bytes[first : first + count])

    def units(self, microbatch: Microbatch) -> int:
        """Returns how many pieces at most a microbatch has here."""
        return self.intake.units(microbatch)

    def boundary_bytes(self, microbatch: Microbatch, units: int) -> int:
        """Returns the bytes between two layers."""
        return self.unit_bytes * units

    def layers(self, microbatch: Microbatch, units: int) -> tuple[Layer, ...]:
        """Returns all layers with ``units`` of a microbatch's units.

        Raises:
            InvalidProfileError: So many, or so few, were not measured.
        """
        known = sorted(self.tables)
        if units in self.tables:
            return self.tables[units]
        if not known[0] <= units <= known[-1]:
            raise InvalidProfileError(
                f"{self.name} was measured at {known[0]} to {known[-1]} units, not at {units}; measure there too"
            )
        above = known[bisect.bisect(known, units)]
        below = known[bisect.bisect(known, units) - 1]
        part = (units - below) / (above - below)
        return tuple(_between(one, two, part) for one, two in zip(self.tables[below], self.tables[above], strict=True))


def layers_of_profile(profile: Profile) -> tuple[Layer, ...]:
    """Returns each module of a profile as one layer, on the whole device.

    A profile does not tell backward for inputs from backward for weights; half of it counts for each. Recomputing costs
    another forward, and keeps nothing.

    Raises:
        InvalidProfileError: A module was not measured on one whole device.
    """
    memory = {one.module: one for one in profile.memory}
    layers = []
    for name in profile.graph.names:
        times = []
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            whole = [one for one in profile.samples_of(name, phase) if one.quota == profile.device.num_slots]
            if not whole:
                raise InvalidProfileError(f"{name!r} was not measured on all {profile.device.num_slots} slots; do so")
            times.append(whole[0].median_ms)
        kept = memory[name].activation_bytes if name in memory else 0
        layers.append(
            Layer(
                forward_ms=times[0],
                backward_ms=times[1] / 2,
                weights_ms=times[1] / 2,
                strategies=(
                    Strategy(name="keep", kept_bytes=kept),
                    Strategy(name="recompute", kept_bytes=0, extra_backward_ms=times[0]),
                ),
            )
        )
    return tuple(layers)


def _figures(layer: Layer) -> tuple[float, ...]:
    own = (layer.forward_ms, layer.backward_ms, layer.weights_ms, layer.workspace_bytes)
    return own + tuple(
        value for one in layer.strategies for value in (one.kept_bytes, one.extra_forward_ms, one.extra_backward_ms)
    )


def _between(one: Layer, two: Layer, part: float) -> Layer:
    def mixed(low: float, high: float) -> float:
        return low + (high - low) * part

    return Layer(
        forward_ms=mixed(one.forward_ms, two.forward_ms),
        backward_ms=mixed(one.backward_ms, two.backward_ms),
        weights_ms=mixed(one.weights_ms, two.weights_ms),
        workspace_bytes=math.ceil(mixed(one.workspace_bytes, two.workspace_bytes)),
        strategies=tuple(
            Strategy(
                name=low.name,
                kept_bytes=math.ceil(mixed(low.kept_bytes, high.kept_bytes)),
                extra_forward_ms=mixed(low.extra_forward_ms, high.extra_forward_ms),
                extra_backward_ms=mixed(low.extra_backward_ms, high.extra_backward_ms),
            )
            for low, high in zip(one.strategies, two.strategies, strict=True)
        ),
    )
