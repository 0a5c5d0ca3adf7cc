"""Which surfaces and which interference a cost model is put together from."""

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
from mosaic.errors import InvalidProfileError
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profile import ModuleMemory, Phase, Profile, Sample

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


@pytest.mark.parametrize(
    ("name", "coefficients", "says"),
    [
        ("ours", {}, "unknown form of interference 'ours'; choose one of: none, measured, pairwise, eq8"),
        ("eq8", {}, "'eq8' takes Eq8 coefficients, not none"),
        ("eq8", HALF, "'eq8' takes Eq8 coefficients, not Sharing"),
        ("measured", HALF, "'measured' takes no coefficients, not Sharing"),
    ],
)
def test_forms_without_their_own_coefficients_are_refused(name: str, coefficients, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CostModel.from_profile(profile(), interference=name, coefficients=coefficients)


class Estimate:
    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        return SHARES[module]


def test_bandwidths_that_were_not_measured_are_refused_or_estimated() -> None:
    blind = profile_of({name: linear(8) for name in SHARES}, num_slots=8)
    unknown, estimated = (
        CostModel.from_profile(blind, interference="pairwise", coefficients=HALF, estimate=estimate)
        for estimate in (None, Estimate())
    )
    with pytest.raises(InvalidProfileError, match="or give an analytic cost model as the estimate"):
        unknown.placed_ms("a", F, 1, 2, beside=[("b", 2)])
    assert estimated.placed_ms("a", F, 1, 2, beside=[("b", 2)]) == pytest.approx(4 * 1.2)


def test_a_frozen_module_disturbs_nobody_in_the_backward_that_it_has_not() -> None:
    old = profile()
    nodes = tuple(replace(node, trainable=node.name != "d") for node in old.graph.modules)
    samples = tuple(s for s in old.samples if (s.module, s.phase) != ("d", B))
    frozen = replace(old, graph=ModuleGraph(modules=nodes), samples=samples)
    cost = CostModel.from_profile(frozen, interference="pairwise", coefficients=HALF)
    assert cost.placed_ms("a", B, 1, 2, beside=[("d", 2)]) == 4.0
    assert cost.placed_ms("a", B, 1, 2, beside=[("d", 2), ("b", 2)]) == pytest.approx(4 * 1.2)


def test_quotas_at_which_a_phase_cannot_run_are_not_offered() -> None:
    base = profile_of({"a": linear(8), "b": flat(1)}, num_slots=4)

    def fail(sample: Sample) -> Sample:
        if (sample.module, sample.phase, sample.quota) != ("a", B, 1):
            return sample
        return replace(sample, times_ms=(), infeasible="OutOfMemoryError: 3 GiB")

    cost = CostModel.from_profile(replace(base, samples=tuple(map(fail, base.samples))))
    assert cost.quotas("a") == (2, 3, 4)
    assert cost.quotas("b") == (1, 2, 3, 4)
    with pytest.raises(ValueError, match="'a' backward cannot run at degree 1, quota 1: OutOfMemoryError"):
        cost.time_ms("a", B, 1, 1)


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
