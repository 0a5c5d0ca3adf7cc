"""Layers from measurements."""

from __future__ import annotations

import dataclasses

import pytest

from mosaic.device import Device
from mosaic.errors import InvalidProfileError
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.pipelining.workload.intake import Intake
from mosaic.pipelining.workload.layers import Layer, Strategy
from mosaic.pipelining.workload.measured import MeasuredModule, layers_of_profile
from mosaic.pipelining.workload.microbatch import Microbatch
from mosaic.profile import Environment, ModuleMemory, Phase, Profile, Sample


def layer(ms: float, kept: int) -> Layer:
    return Layer(forward_ms=ms, backward_ms=ms, weights_ms=ms, strategies=(Strategy(name="keep", kept_bytes=kept),))


def module(**more: object) -> MeasuredModule:
    base = MeasuredModule(
        name="vision",
        intake=Intake(unit="image", image_tokens=4),
        trains=(True, False),
        tables={2: (layer(1.0, 10), layer(2.0, 20)), 6: (layer(3.0, 30), layer(4.0, 41))},
        parameters=(5, 6),
        resident_bytes=(50, 12),
        unit_bytes=8,
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def test_layers_between_measured_units_lie_on_the_line() -> None:
    found = module().layers(Microbatch(images=9), 3)
    assert [one.forward_ms for one in found] == [1.5, 2.5]
    assert [one.strategies[0].kept_bytes for one in found] == [15, 26]
    assert module().layers(Microbatch(images=9), 6) == module().tables[6]


def test_units_beyond_what_was_measured_are_refused() -> None:
    for units in (1, 7):
        with pytest.raises(InvalidProfileError, match=f"measured at 2 to 6 units, not at {units}"):
            module().layers(Microbatch(images=9), units)


def test_it_says_its_bytes_and_parameters() -> None:
    assert module().units(Microbatch(images=9)) == 9
    assert module().boundary_bytes(Microbatch(images=9), 3) == 24
    assert (module().state_bytes(0, 2), module().num_parameters(1, 1)) == (62, 6)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {2: (layer(1.0, 1),)},
        {0: (layer(1.0, 1), layer(1.0, 1))},
        {2: (layer(float("nan"), 1), layer(1.0, 1))},
        {2: (layer(1.0, -1), layer(1.0, 1))},
    ],
)
def test_bad_tables_are_refused(tables: dict[int, tuple[Layer, ...]]) -> None:
    with pytest.raises(InvalidProfileError, match="vision"):
        module(tables=tables)


def test_a_profile_gives_a_layer_for_each_of_its_modules() -> None:
    names = ("block.0", "block.1")
    profile = Profile(
        device=Device(name="d", kind="host", num_slots=2, sms_per_slot=1, remainder_sms=0, memory_bytes=10**9),
        graph=ModuleGraph(modules=tuple(ModuleNode(name=name) for name in names)),
        samples=tuple(
            Sample(module=name, phase=phase, quota=2, times_ms=(time,))
            for name in names
            for phase, time in ((Phase.FORWARD, 2.0), (Phase.BACKWARD, 6.0))
        ),
        memory=(ModuleMemory(module="block.0", resident_bytes=5, activation_bytes=7),),
        environment=Environment(torch_version="", python_version="", created="", foreign_cpu_share=0.0),
    )
    first, second = layers_of_profile(profile)
    assert (first.forward_ms, first.backward_ms, first.weights_ms) == (2.0, 3.0, 3.0)
    assert [one.strategies[0].kept_bytes for one in (first, second)] == [7, 0]
    halved = dataclasses.replace(profile, samples=tuple(dataclasses.replace(s, quota=1) for s in profile.samples))
    with pytest.raises(InvalidProfileError, match="not measured on all 2 slots"):
        layers_of_profile(halved)
