"""Exact search against brute force on random small instances with every feature on, and laws that hold at any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from instance_cases import ROUNDING_MS, bounded, instances, solve_instance
from plan_checker import check_plan

from bench.solver.generate import SHAPES, Recipe, generate
from mosaic import _search
from mosaic.solver.instance import Instance, TableCost


@bounded(150)
@given(instance=instances())
def test_exact_agrees_with_brute_force_and_is_never_above_anybody(instance):
    exact, _ = solve_instance(instance, time_limit=60)
    truth, _ = solve_instance(instance, method="brute_force")
    assert exact.status == truth.status == "optimal"
    assert exact.objective_ms == pytest.approx(truth.objective_ms, abs=ROUNDING_MS)
    in_turn, _ = solve_instance(instance, method="sequential")
    assert exact.objective_ms <= in_turn.objective_ms + ROUNDING_MS


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
    answer, error = solve_instance(instance, time_limit=seconds)
    assert error is None
    assert check_plan(instance, answer.plan).problems == ()
    assert answer.bound_ms <= answer.objective_ms <= answer.plan.sequential_ms + ROUNDING_MS


def problem_of(instance: Instance) -> _search.Problem:
    """Without disturbances, straight into the extension."""
    cost = TableCost(instance)
    names = [module.name for module in instance.modules]
    made = []
    for module in instance.modules:
        rows = [
            (
                option.degree,
                option.quota,
                round(option.forward_ms * 1e6),
                round(option.backward_ms * 1e6),
                cost.memory_bytes(module.name, option.degree),
            )
            for option in module.allowed
        ]
        made.append(_search.Module(rows, sorted(names.index(other) for other in module.after)))
    return _search.Problem(
        made,
        num_devices=instance.num_devices,
        num_slots=instance.num_slots,
        memory_bytes=instance.memory_bytes,
    )
