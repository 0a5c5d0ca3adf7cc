"""Laws of plans whose search is cut off, and of the largest graphs that are searched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from instance_cases import solve_instance

from bench.solver.generate import SHAPES, Recipe, generate
from mosaic import _search
from mosaic.solver.exact import build_problem
from mosaic.solver.instance import Instance, TableCost
from mosaic.solver.options import all_options
from mosaic.solver.stage import Machine
from tests.property.planning.test_exact_laws import bounded, instances, problem_of

NS_PER_MS = 1e6
ROUNDING_MS = 1e-4


def disturbed_problem_of(instance: Instance) -> _search.Problem:
    """With disturbances and pins, as the solver sees it."""
    cost = TableCost(instance)
    machine = Machine(
        num_devices=instance.num_devices, num_slots=instance.num_slots, memory_bytes=instance.memory_bytes
    )
    options = all_options(instance.graph, cost=cost, device=instance.device, num_devices=instance.num_devices)
    return build_problem(instance.graph, options, cost=cost, machine=machine)


@bounded(50)
@given(instance=instances(), seconds=st.sampled_from([1e-5, 1e-4, 1e-3]), max_nodes=st.sampled_from([1, 3, 10]))
def test_a_bound_is_true_however_little_is_spent_on_it(instance, seconds, max_nodes):
    truth, _ = solve_instance(instance, method="brute_force")
    problem = disturbed_problem_of(instance)
    for limits in ({"seconds": seconds}, {"max_nodes": max_nodes}):
        found = _search.plan(problem, **limits)
        assert found.bound_ns / NS_PER_MS <= truth.objective_ms + ROUNDING_MS
        assert truth.objective_ms <= found.cost_ns / NS_PER_MS + ROUNDING_MS


def in_a_row(instance: Instance, num_copies: int) -> Instance:
    """Copies of an instance, each after all of the one before."""
    modules = tuple(
        replace(
            module,
            name=f"{module.name}_{copy}",
            after=(
                *(f"{other}_{copy}" for other in module.after),
                *(f"{other.name}_{copy - 1}" for other in instance.modules if copy > 0),
            ),
        )
        for copy in range(num_copies)
        for module in instance.modules
    )
    return replace(instance, modules=modules)


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_in_a_row_take_as_long_as_one_so_many_times(shape):
    one = generate(Recipe(shape=shape, num_modules=5, tight_memory=True, seed=3))
    alone = _search.plan(problem_of(one), effort=60.0)
    found = _search.plan(problem_of(in_a_row(one, 3)), effort=60.0)
    assert alone.status == found.status == "optimal"
    assert found.cost_ns == 3 * alone.cost_ns


@pytest.mark.parametrize(
    ("shape", "num_modules"), [("align", 13), ("star", 16), ("multi", 16), ("layered", 16), ("chain", 16)]
)
def test_the_same_seed_gives_the_same_plan(shape, num_modules):
    problem = disturbed_problem_of(generate(Recipe(shape=shape, num_modules=num_modules, seed=1)))
    first, second = (_search.plan(problem, effort=60.0) for _ in range(2))
    assert first.status == second.status == "optimal"
    assert [stage.rows for stage in first.stages] == [stage.rows for stage in second.stages]
