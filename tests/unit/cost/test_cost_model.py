"""The surfaces and the interference that make a cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_cases import flat, linear, profile_of

from mosaic.cost import (
    ADAMW_BYTES,
    CostModel,
    Eq8,
    Eq8Interference,
    MeasuredInterference,
    NoInterference,
    PairwiseInterference,
    Sharing,
)
from mosaic.cost.interference import FORMS
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profile import ModuleMemory, Phase, Profile

F, B = Phase.FORWARD, Phase.BACKWARD
SHARES = {"a": 0.2, "b": 0.4, "c": 0.6, "d": 0.9}
HALF = {phase: Sharing(pressure=0.5) for phase in Phase}


def profile() -> Profile:
    """Four modules and the bandwidth that each uses."""
    base = profile_of({name: linear(8) for name in SHARES}, num_slots=8)
    return replace(base, samples=tuple(replace(s, bandwidth_utilisation=SHARES[s.module]) for s in base.samples))


@pytest.mark.parametrize(
    ("name", "coefficients", "kind"),
    [
        ("measured", {}, MeasuredInterference),
        ("none", {}, NoInterference),
        ("eq8", {F: Eq8(e1=0.0, e2=1.0, e3=1.0)}, Eq8Interference),
        ("pairwise", HALF, PairwiseInterference),
    ],
)
def test_every_form_of_the_table_is_made_by_name_from_its_coefficients(name: str, coefficients, kind: type) -> None:
    assert name in FORMS
    cost = CostModel.from_profile(profile(), interference=name, coefficients=coefficients)
    assert type(cost.interference) is kind
    assert cost.placed_ms("a", F, 1, 2) == 4.0


def test_a_frozen_module_takes_no_time_and_disturbs_no_other_in_backward() -> None:
    old = profile()
    nodes = tuple(replace(node, trainable=node.name != "d") for node in old.graph.modules)
    samples = tuple(s for s in old.samples if (s.module, s.phase) != ("d", B))
    frozen = replace(old, graph=ModuleGraph(modules=nodes), samples=samples)
    cost = CostModel.from_profile(frozen, interference="pairwise", coefficients=HALF)
    assert (cost.time_ms("d", B, 1, 1), cost.quotas("d")) == (0.0, tuple(range(1, 9)))
    assert cost.placed_ms("a", B, 1, 2, beside=[("d", 2)]) == 4.0
    assert cost.placed_ms("a", B, 1, 2, beside=[("d", 2), ("b", 2)]) == pytest.approx(4 * 1.2)


def test_memory_counts_the_optimizers_state_of_what_trains_on_every_device() -> None:
    memory = [
        ModuleMemory(module="a", resident_bytes=1000, activation_bytes=100, num_trained=30),
        ModuleMemory(module="b", resident_bytes=1000, activation_bytes=100),
        ModuleMemory(module="c", resident_bytes=1000, activation_bytes=100),
    ]
    base = profile_of({"a": flat(1), "b": flat(1), "c": flat(1)}, num_slots=1, degrees=(1, 2), memory=memory)
    nodes = [ModuleNode(name=name, num_parameters=50, trainable=name != "c") for name in "abc"]
    profile = replace(base, graph=ModuleGraph(modules=tuple(nodes)))
    cost = CostModel.from_profile(profile)
    assert ADAMW_BYTES == 8
    assert [cost.kept_bytes(name, 2) for name in "abc"] == [1050 + 240, 1050 + 400, 1050]
    assert [cost.memory_bytes(name, 2) for name in "abc"] == [1050 + 240, 1050 + 400, 1050]
    plain = CostModel.from_profile(profile, optimizer_bytes=0)
    assert [plain.kept_bytes(name, 1) for name in "abc"] == [1100] * 3


def test_cost_model_counts_resident_kept_and_peak_memory() -> None:
    base = profile_of(
        {"m": flat(1)},
        num_slots=1,
        memory=[ModuleMemory(module="m", resident_bytes=1000, activation_bytes=100, lane_bytes=7)],
    )
    peaks = {F: 130, B: 50}
    profile = replace(base, samples=tuple(replace(s, peak_bytes=peaks[s.phase]) for s in base.samples))
    assert CostModel.from_profile(profile).memory_bytes("m", 1) == 1000 + 7 + 100 + 50
