"""Which surfaces and which interference a cost model is put together from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_cases import flat, linear, pair, profile_of

from mosaic.cost import (
    ADAMW_BYTES,
    AdditiveInterference,
    CostModel,
    FullInterference,
    MeasuredInterference,
    NoInterference,
    SharedBandwidth,
    errors_of_profile,
    fit_interference,
)
from mosaic.cost.interference.bandwidth import Bandwidths
from mosaic.errors import InfeasibleError, InvalidProfileError
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profile import GroupMember, GroupSample, ModuleMemory, Phase, Profile, Sample
from mosaic.solver import solve

F, B = Phase.FORWARD, Phase.BACKWARD
SHARES = {"a": 0.2, "b": 0.4, "c": 0.6, "d": 0.9}


def member(module: str, beside: list[str], phase: Phase, quota: int = 2) -> GroupMember:
    extra = 0.5 * sum(SHARES[name] for name in beside)
    return GroupMember(module=module, phase=phase, quota=quota, times_ms=(4 * (1 + extra),), alone_ms=(4.0,))


def profile() -> Profile:
    """Four modules; groups of two and three that lose half of their neighbours' share."""
    base = profile_of({name: linear(8) for name in SHARES}, num_slots=8)
    sets = ["ab", "ac", "ad", "bc", "bd", "cd", "abc", "bcd", "acd"]
    return replace(
        base,
        samples=tuple(replace(s, bandwidth_utilisation=SHARES[s.module]) for s in base.samples),
        groups=tuple(
            GroupSample(members=tuple(member(m, [n for n in names if n != m], phase) for m in names))
            for names in sets
            for phase in Phase
        ),
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("none", NoInterference),
        ("additive", AdditiveInterference),
        ("full", FullInterference),
        ("pairwise", SharedBandwidth),
        ("mosaic", SharedBandwidth),
        ("measured", MeasuredInterference),
    ],
)
def test_interference_is_chosen_by_name(name: str, kind: type) -> None:
    cost = CostModel.from_profile(profile(), interference=name)
    assert type(cost.interference) is kind
    assert cost.placed_ms("a", F, 1, 2) == 4.0


def test_our_form_predicts_what_the_groups_lost_and_says_what_it_has_not_seen() -> None:
    cost = CostModel.from_profile(profile(), interference="mosaic")
    assert cost.placed_ms("a", F, 1, 2, beside=[("b", 2)]) == pytest.approx(4 * 1.2)
    assert cost.placed_ms("a", B, 1, 4, beside=[("b", 2), ("c", 2)]) == pytest.approx(2 * 1.5)
    assert cost.findings == ("4 modules may share a device; fitted groups had at most 3",)


def test_measured_pairs_may_come_as_groups_of_two() -> None:
    cost = CostModel.from_profile(profile())
    assert cost.placed_ms("a", F, 1, 2, beside=[("b", 2)]) == pytest.approx(4 * 1.2)
    assert cost.findings == ()


def test_a_fit_from_another_model_is_reused() -> None:
    old = profile()
    fit = fit_interference(old.groups, Bandwidths(old.samples), "mosaic", device=old.device)
    new = replace(old, groups=())
    with pytest.raises(InvalidProfileError, match="measure groups before fitting"):
        CostModel.from_profile(new, interference="mosaic")
    cost = CostModel.from_profile(new, interference="mosaic", fit=fit)
    assert cost.placed_ms("a", F, 1, 2, beside=[("b", 2)]) == pytest.approx(4 * 1.2)


def test_a_fit_of_another_form_than_the_one_asked_for_is_refused() -> None:
    old = profile()
    fit = fit_interference(old.groups, Bandwidths(old.samples), "additive", device=old.device)
    with pytest.raises(ValueError, match="interference='full', but the fit is of the form 'additive'"):
        CostModel.from_profile(old, interference="full", fit=fit)


class Estimate:
    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        return SHARES[module]


def test_bandwidths_that_were_not_measured_are_refused_or_estimated_and_said() -> None:
    blind = replace(profile(), samples=profile_of({name: linear(8) for name in SHARES}, num_slots=8).samples)
    with pytest.raises(InvalidProfileError, match="or give an analytic cost model as the estimate"):
        CostModel.from_profile(blind, interference="mosaic")
    cost = CostModel.from_profile(blind, interference="mosaic", estimate=Estimate())
    assert cost.placed_ms("a", F, 1, 2, beside=[("b", 2)]) == pytest.approx(4 * 1.2)
    assert "bandwidth of 'a' forward is estimated" in cost.findings
    assert cost.bandwidth("c", B, 1, 2) == 0.6


def test_a_frozen_module_disturbs_nobody_in_the_backward_that_it_has_not() -> None:
    old = profile()
    nodes = tuple(replace(node, trainable=node.name != "d") for node in old.graph.modules)
    frozen = replace(
        old,
        graph=ModuleGraph(modules=nodes),
        samples=tuple(s for s in old.samples if (s.module, s.phase) != ("d", B)),
        groups=tuple(g for g in old.groups if ("d", B) not in {(m.module, m.phase) for m in g.members}),
    )
    cost = CostModel.from_profile(frozen, interference="additive")
    assert cost.bandwidth("d", B, 1, 2) == 0
    assert cost.placed_ms("a", B, 1, 2, beside=[("d", 2)]) >= 4.0


def test_surfaces_are_chosen_by_name() -> None:
    noisy = profile_of({"a": lambda d, q: 1 + 8 / (d * q) + 0.01 * (q % 2)}, num_slots=8)
    smooth, fitted = (CostModel.from_profile(noisy, surface=name) for name in ("smooth", "alpha-beta"))
    assert smooth.time_ms("a", F, 1, 3) == noisy.samples_of("a", F)[2].median_ms
    assert fitted.time_ms("a", F, 1, 3) == pytest.approx(smooth.time_ms("a", F, 1, 3), rel=0.01)
    assert fitted.time_ms("a", F, 1, 3) != smooth.time_ms("a", F, 1, 3)
    with pytest.raises(ValueError, match="surface='linear'; use one of shaped, smooth, alpha-beta"):
        CostModel.from_profile(noisy, surface="linear")


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


def test_pairs_and_groups_are_fitted_together() -> None:
    old = profile()
    pairs = tuple(pair("a", "b", 1.2, phase=phase) for phase in Phase)
    both, groups = (CostModel.from_profile(p, interference="mosaic") for p in (replace(old, pairs=pairs), old))
    ask = {"beside": [("c", 2)]}
    assert both.placed_ms("a", F, 1, 2, **ask) == pytest.approx(groups.placed_ms("a", F, 1, 2, **ask))


def test_a_profile_s_errors_at_held_out_points_are_of_every_form() -> None:
    old = profile()
    found = errors_of_profile(old)
    surfaces = {(e.subject, e.phase, e.form) for e in found if e.subject != "interference"}
    assert surfaces == {(name, phase, form) for name in SHARES for phase in Phase for form in ("smooth", "alpha-beta")}
    forms = [e.form for e in found if e.subject == "interference"]
    assert set(forms[:4]) == {"pairwise", "mosaic"}
    assert set(forms) == {"none", "additive", "full", "pairwise", "mosaic"}
    assert replace(old, held_out=found).held_out == found


def test_what_cannot_be_judged_has_no_error() -> None:
    blind = profile_of({"a": flat(1), "b": flat(1)}, num_slots=2, pairs=[pair("a", "b", 1.2, phase=F)])
    assert errors_of_profile(blind) == ()
    failed = Sample(module="a", phase=B, quota=1, infeasible="OutOfMemoryError")
    assert errors_of_profile(replace(blind, samples=(failed,))) == ()


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


def test_optimizer_state_rules_out_what_fits_without_it() -> None:
    memory = [ModuleMemory(module="a", resident_bytes=1000, activation_bytes=0, num_trained=125)]
    profile = profile_of({"a": flat(1)}, num_slots=1, memory=memory, memory_bytes=1999)
    assert solve(profile.graph, CostModel.from_profile(profile, optimizer_bytes=0), profile.device).stages
    with pytest.raises(InfeasibleError, match="'a' needs 2,000 bytes"):
        solve(profile.graph, CostModel.from_profile(profile), profile.device)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_optimizer_bytes_that_are_none_are_refused(value: float) -> None:
    profile = profile_of({"a": flat(1)}, num_slots=1)
    with pytest.raises(ValueError, match="bytes for each parameter are finite, 0 or more"):
        CostModel.from_profile(profile, optimizer_bytes=value)
