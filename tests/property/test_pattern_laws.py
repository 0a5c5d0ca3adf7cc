"""Prices and patterns, which plan large graphs, on small ones: against brute force, and against the exact search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic import _search
from mosaic.solver.exact import _problem as full_problem
from mosaic.solver.generate import SHAPES, Recipe, generate
from mosaic.solver.instance import Instance
from mosaic.solver.instance_cost import TableCost
from mosaic.solver.options import all_options
from mosaic.solver.placement import Machine
from mosaic.solver.problem_file import solve_instance
from tests.property.test_exact_laws import bounded, instances, problem_of

NS_PER_MS = 1e6
ROUNDING_MS = 1e-4


def disturbed_problem_of(instance: Instance) -> _search.Problem:
    """With disturbances and pins, as the solver sees it."""
    cost = TableCost(instance)
    machine = Machine(
        num_devices=instance.num_devices, num_slots=instance.num_slots, memory_bytes=instance.memory_bytes
    )
    options = all_options(instance.graph, cost=cost, device=instance.device, num_devices=instance.num_devices)
    names = instance.graph.topological_order()
    return full_problem(_search, instance.graph, names, options, cost=cost, machine=machine, objective="phases")


@bounded(300)
@given(instance=instances())
def test_patterns_agree_with_brute_force_with_memory_pins_and_disturbances(instance):
    truth, _ = solve_instance(instance, method="brute_force")
    found = _search.plan(disturbed_problem_of(instance), patterns=True, kicks=0)
    assert found.status == "optimal"
    assert found.bound_ns == found.cost_ns
    assert found.cost_ns / NS_PER_MS == pytest.approx(truth.objective_ms, abs=ROUNDING_MS)


@bounded(100)
@given(instance=instances(), seconds=st.sampled_from([1e-5, 1e-4, 1e-3]), max_nodes=st.sampled_from([1, 3, 10]))
def test_a_bound_is_true_however_little_is_spent_on_it(instance, seconds, max_nodes):
    truth, _ = solve_instance(instance, method="brute_force")
    problem = disturbed_problem_of(instance)
    for limits in ({"seconds": seconds}, {"max_nodes": max_nodes}, {"max_nodes": max_nodes, "max_edges": 1}):
        found = _search.plan(problem, patterns=True, **limits)
        assert found.bound_ns / NS_PER_MS <= truth.objective_ms + ROUNDING_MS
        assert truth.objective_ms <= found.cost_ns / NS_PER_MS + ROUNDING_MS


@bounded(60)
@given(instance=instances())
def test_patterns_minimise_the_papers_sum_too(instance):
    problem = problem_of(instance, "sum")
    exact, found = _search.plan(problem), _search.plan(problem, patterns=True, kicks=0)
    assert found.status == exact.status == "optimal"
    assert found.cost_ns == exact.cost_ns


@settings(parent=bounded(25))
@given(
    shape=st.sampled_from(SHAPES),
    num_modules=st.integers(6, 10),
    num_devices=st.sampled_from([1, 4, 8]),
    tight=st.booleans(),
    disturbed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_patterns_and_the_exact_search_find_the_same_cost(shape, num_modules, num_devices, tight, disturbed, seed):
    recipe = Recipe(
        shape=shape,
        num_modules=num_modules,
        num_devices=num_devices,
        tight_memory=tight,
        disturbed=disturbed,
        seed=seed,
    )
    problem = disturbed_problem_of(generate(recipe))
    exact, found = _search.plan(problem, seconds=20.0), _search.plan(problem, seconds=20.0, patterns=True, kicks=0)
    assert max(exact.bound_ns, found.bound_ns) <= min(exact.cost_ns, found.cost_ns)
    if exact.status == found.status == "optimal":
        assert exact.cost_ns == found.cost_ns


@pytest.mark.parametrize(("shape", "num_modules"), [("align", 16), ("star", 20), ("multi", 20)])
def test_the_same_seed_gives_the_same_plan(shape, num_modules):
    problem = disturbed_problem_of(generate(Recipe(shape=shape, num_modules=num_modules, seed=1)))
    first, second = (_search.plan(problem, seconds=60.0, patterns=True) for _ in range(2))
    assert first.status == second.status == "optimal"
    assert [[(one.module, one.option, one.devices) for one in stage.placed] for stage in first.stages] == [
        [(one.module, one.option, one.devices) for one in stage.placed] for stage in second.stages
    ]
