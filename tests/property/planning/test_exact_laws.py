"""Exact search against brute force on random small instances with every feature on, and laws that hold at any size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from brute_force import plan_by_brute_force
from hypothesis import given
from hypothesis import strategies as st
from instance_cases import ROUNDING_MS, bounded, instances, solve_instance
from plan_checker import check_plan
from planning_cases import linear, profile_of

from bench.solver.generate import SHAPES, Recipe, generate
from mosaic import _search
from mosaic.cost import Bandwidths, CostModel, LeveledBandwidth, Leveling
from mosaic.profile import Phase, Profile
from mosaic.solver import solve
from mosaic.solver.instance import Instance, TableCost


@bounded(300)
@given(instance=instances())
def test_exact_agrees_with_brute_force_and_is_never_above_anybody(instance):
    exact, _ = solve_instance(instance, time_limit=60)
    truth, _ = solve_instance(instance, method="brute_force")
    assert exact.status == truth.status == "optimal"
    assert exact.objective_ms == pytest.approx(truth.objective_ms, abs=ROUNDING_MS)
    for method in ("heuristic", "sequential"):
        other, _ = solve_instance(instance, method=method)
        assert exact.objective_ms <= other.objective_ms + ROUNDING_MS
        assert other.bound_ms is None or other.bound_ms <= truth.objective_ms + ROUNDING_MS


@bounded(25)
@given(instance=instances(most_modules=4))
def test_algorithm_1_is_never_below_the_optimum(instance):
    exact, _ = solve_instance(instance)
    gahc, _ = solve_instance(instance, method="gahc")
    assert exact.objective_ms <= gahc.objective_ms + ROUNDING_MS


@bounded(40)
@given(
    shape=st.sampled_from(SHAPES),
    num_modules=st.integers(3, 12),
    num_devices=st.sampled_from([1, 2, 4, 8]),
    tight=st.booleans(),
    disturbed=st.booleans(),
    seconds=st.sampled_from([0.0, 0.02, 0.3]),
    seed=st.integers(0, 1000),
)
def test_bound_is_below_plan_is_below_sequential_whatever_ends_the_search(
    shape, num_modules, num_devices, tight, disturbed, seconds, seed
):
    instance = generate(
        Recipe(
            shape=shape,
            num_modules=num_modules,
            num_devices=num_devices,
            tight_memory=tight,
            disturbed=disturbed,
            seed=seed,
        )
    )
    answer, error = solve_instance(instance, time_limit=seconds, seed=seed)
    assert error is None
    assert check_plan(instance, answer.plan).problems == ()
    assert answer.bound_ms <= answer.objective_ms <= answer.plan.sequential_ms + ROUNDING_MS


@bounded(60)
@given(instance=instances())
def test_both_objectives_are_bounded_by_each_other(instance):
    """Slowest forward plus slowest backward is never below the slowest module's two together."""
    costs = {objective: _search.plan(problem_of(instance, objective)) for objective in ("sum", "phases")}
    assert all(plan.status == "optimal" and plan.bound_ns == plan.cost_ns for plan in costs.values())
    assert costs["sum"].cost_ns <= costs["phases"].cost_ns <= 2 * costs["sum"].cost_ns


@st.composite
def leveled(draw: st.DrawFn) -> tuple[CostModel, Profile]:
    """Modules whose use of bandwidth rises with their slots, as our form has it when the search can prune by it."""
    names = "abcd"[: draw(st.integers(2, 4))]
    work = st.floats(0.5, 20)
    profile = profile_of({name: linear(draw(work)) for name in names}, num_slots=4, degrees=(1, 2))
    rising = {(n, p): sorted(draw(st.lists(st.floats(0, 1), min_size=4, max_size=4))) for n in names for p in Phase}
    bandwidths = Bandwidths(
        replace(s, bandwidth_utilisation=rising[s.module, s.phase][s.quota - 1])
        for s in profile.samples
        if s.degree == 1
    )
    slot, part = st.floats(0.05, 0.5), st.floats(0, 1)
    laws = {
        phase: Leveling(
            draw=draw(slot),
            capacity=draw(st.floats(0.2, 1.2)),
            fairness=draw(part),
            cache=draw(part),
            idle=draw(part),
            draws={names[0]: draw(slot)},
        )
        for phase in Phase
    }
    cost = CostModel.from_profile(profile)
    cost.interference = LeveledBandwidth(laws, bandwidths)
    return cost, profile


@bounded(40)
@given(made=leveled(), num_devices=st.integers(1, 2))
def test_exact_agrees_with_brute_force_where_bandwidth_runs_out(made, num_devices):
    cost, profile = made
    exact, truth = (
        plan(profile.graph, cost, profile.device, num_devices=num_devices)
        for plan in (partial(solve, method="exact"), plan_by_brute_force)
    )
    assert exact.search.status == "optimal"
    assert exact.predicted_ms == pytest.approx(truth.predicted_ms, rel=1e-6)
    assert exact.search.bound_ms <= truth.predicted_ms + ROUNDING_MS


def problem_of(instance: Instance, objective: str) -> _search.Problem:
    """Without disturbances, straight into the extension."""
    cost = TableCost(instance)
    names = [module.name for module in instance.modules]
    made = []
    for module in instance.modules:
        options = [
            _search.Option(
                degree=option.degree,
                quota=option.quota,
                forward_ns=round(option.forward_ms * 1e6),
                backward_ns=round(option.backward_ms * 1e6),
                memory_bytes=cost.memory_bytes(module.name, option.degree),
            )
            for option in module.allowed
        ]
        made.append(_search.Module(options, sorted(names.index(other) for other in module.after)))
    return _search.Problem(
        made,
        num_devices=instance.num_devices,
        num_slots=instance.num_slots,
        memory_bytes=instance.memory_bytes,
        objective=objective,
    )
