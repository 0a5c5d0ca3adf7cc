"""Exact search against brute force on random small instances with every feature on, and laws that hold at any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from instance_cases import ROUNDING_MS, bounded, instances, solve_instance

from bench.solver.generate import SHAPES, Recipe, generate
from mosaic import _search
from mosaic.solver.exact.search import SearchLimits
from mosaic.solver.instances.checker import check_plan
from mosaic.solver.instances.instance import Instance
from mosaic.solver.instances.instance_cost import TableCost
from mosaic.solver.replan.replanner import Replanner


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
@given(instance=instances(), gone=st.integers(0, 4), halved=st.integers(0, 4))
def test_a_replan_that_may_take_its_time_is_as_good_as_a_cold_solve(instance, gone, halved):
    """A module comes or goes and another one's times change: what is known of the other sets must still hold."""
    name = instance.modules[gone % len(instance.modules)].name
    kept = [
        replace(module, after=tuple(other for other in module.after if other != name))
        for module in instance.modules
        if module.name != name
    ]
    if not kept:
        return
    at = halved % len(kept)
    faster = [replace(option, forward_ms=option.forward_ms / 2) for option in kept[at].options]
    kept[at] = replace(kept[at], options=tuple(faster))
    disturbances = tuple(d for d in instance.disturbances if name not in (d.module, d.beside))
    less = replace(instance, modules=tuple(kept), disturbances=disturbances)
    for before, after in ((instance, less), (less, instance)):
        planner = Replanner(device=before.device, num_devices=before.num_devices)
        planner.update(before.graph, TableCost(before))
        warm = planner.update(after.graph, TableCost(after), limits=SearchLimits(effort=60))
        cold, _ = solve_instance(after, time_limit=60)
        assert warm.search.status == "optimal"
        assert warm.predicted_ms == pytest.approx(cold.objective_ms, abs=ROUNDING_MS)


@bounded(60)
@given(instance=instances())
def test_both_objectives_are_bounded_by_each_other(instance):
    """Slowest forward plus slowest backward is never below the slowest module's two together."""
    costs = {objective: _search.plan(problem_of(instance, objective)) for objective in ("sum", "phases")}
    assert all(plan.status == "optimal" and plan.bound_ns == plan.cost_ns for plan in costs.values())
    assert costs["sum"].cost_ns <= costs["phases"].cost_ns <= 2 * costs["sum"].cost_ns


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
