"""Exact search against brute force on random small instances with every feature on, and laws that hold at any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from instance_cases import ROUNDING_MS, bounded, instances, solve_instance

from bench.solver.generate import SHAPES, Recipe, generate
from mosaic import _search
from mosaic.solver.exact import build_problem
from mosaic.solver.instance import TableCost
from mosaic.solver.options import all_options
from mosaic.solver.stage import Machine


@bounded(150)
@given(instance=instances())
def test_exact_agrees_with_brute_force_and_is_never_above_anybody(instance):
    exact = solve_instance(instance, time_limit=60)
    truth = solve_instance(instance, method="brute_force")
    assert exact.status == truth.status == "optimal"
    assert exact.objective_ms == pytest.approx(truth.objective_ms, abs=ROUNDING_MS)
    greedy, in_turn = (solve_instance(instance, method=method) for method in ("gahc", "sequential"))
    assert exact.objective_ms <= greedy.objective_ms + ROUNDING_MS
    assert greedy.objective_ms <= in_turn.objective_ms + ROUNDING_MS


@bounded(30)
@given(
    shape=st.sampled_from(SHAPES),
    num_modules=st.integers(3, 16),
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
    answer = solve_instance(instance, time_limit=seconds)
    assert answer.plan is not None
    assert answer.bound_ms <= answer.objective_ms <= answer.plan.sequential_ms + ROUNDING_MS


@bounded(50)
@given(instance=instances(), seconds=st.sampled_from([1e-5, 1e-4, 1e-3]), max_nodes=st.sampled_from([1, 3, 10]))
def test_a_bound_is_true_however_little_is_spent_on_it(instance, seconds, max_nodes):
    truth = solve_instance(instance, method="brute_force")
    cost, count = TableCost(instance), instance.num_devices
    machine = Machine(num_devices=count, num_slots=instance.num_slots, memory_bytes=instance.memory_bytes)
    options = all_options(instance.graph, cost=cost, device=instance.device, num_devices=count)
    problem = build_problem(instance.graph, options, cost=cost, machine=machine)
    for limits in ({"seconds": seconds}, {"max_nodes": max_nodes}):
        limited = _search.plan(problem, **limits)
        assert limited.bound_ns / 1e6 <= truth.objective_ms + ROUNDING_MS
        assert truth.objective_ms <= limited.cost_ns / 1e6 + ROUNDING_MS
