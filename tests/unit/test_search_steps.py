"""Single steps of the search: stages by area, pairs of stages planned anew, bounds by the order of stages."""

from __future__ import annotations

import itertools
import random

import pytest
from bench.solver.generate import SHAPES, Recipe, generate

from mosaic import _search
from tests.property.test_pattern_laws import disturbed_problem_of

NEVER = (2**63 - 1) // 4
Row = tuple[int, int, int, int, int]


def rows_of(draw: random.Random, num_modules: int) -> list[list[Row]]:
    """Options of modules on four devices of five slots; more area is not always less time."""
    return [
        [
            (degree, quota, draw.randint(1, 30), draw.randint(1, 30), draw.randint(0, 12))
            for degree in (1, 2, 4)
            for quota in (1, 2, 5)
        ]
        for _ in range(num_modules)
    ]


def least_by_area(rows: list[list[Row]], memory: int) -> int:
    """Every choice of options, one by one."""
    fitting = [[row for row in options if row[4] <= memory] for options in rows]
    return min(
        (
            max(row[2] for row in chosen) + max(row[3] for row in chosen)
            for chosen in itertools.product(*fitting)
            if sum(row[0] * row[1] for row in chosen) <= 4 * 5
        ),
        default=NEVER,
    )


@pytest.mark.parametrize("seed", range(30))
def test_what_modules_take_together_by_area_is_the_least_over_all_choices_of_options(seed):
    draw = random.Random(seed)
    rows = rows_of(draw, draw.randint(1, 4))
    memory = draw.choice([4, 8, 12])
    made = _search.Problem(
        [_search.Module.of(each, []) for each in rows], num_devices=4, num_slots=5, memory_bytes=memory
    )
    assert _search.together(made, (1 << len(rows)) - 1) == least_by_area(rows, memory)
    assert _search.together(made, 1) == least_by_area(rows[:1], memory)


def test_modules_that_fit_on_no_area_never_run_together():
    made = _search.Problem([_search.Module.of([(1, 6, 5, 5, 0)], [])] * 2, num_devices=1, num_slots=10)
    assert _search.together(made, 0b01) == 10
    assert _search.together(made, 0b11) == NEVER


def test_the_papers_sum_takes_the_slowest_module_and_not_the_slowest_phases():
    rows = [[(1, 1, 9, 1, 0)], [(1, 1, 1, 8, 0)]]
    for objective, least in (("phases", 17), ("sum", 10)):
        modules = [_search.Module.of(each, []) for each in rows]
        made = _search.Problem(modules, num_devices=1, num_slots=10, objective=objective)
        assert _search.together(made, 0b11) == least


def test_two_stages_that_mix_long_and_short_modules_are_sorted_by_length():
    """Four long and four short modules of four slots each; two fit side by side on a device of ten."""
    rows = [[(1, 5, 100, 200, 0)]] * 2 + [[(1, 5, 1, 2, 0)]] * 2
    made = _search.Problem([_search.Module.of(each, []) for each in rows], num_devices=1, num_slots=10)
    stages, cost = _search.improve_by_pairs(made, [0b0101, 0b1010])
    assert sorted(stages) == [0b0011, 0b1100]
    assert cost == 303


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_keep_a_partition_in_order_and_never_make_it_worse(shape, disturbed):
    instance = generate(Recipe(shape=shape, num_modules=9, num_devices=4, disturbed=disturbed, seed=2))
    problem = disturbed_problem_of(instance)
    names = instance.graph.topological_order()
    singles = [1 << index for index in range(len(names))]
    sequential = _search.plan(problem, seconds=0.0, exact=False).cost_ns
    best = _search.plan(problem, seconds=30.0)
    stages, cost = _search.improve_by_pairs(problem, singles, kicks=2, seconds=60.0)
    assert sum(stages) == (1 << len(names)) - 1
    assert sum(stage.bit_count() for stage in stages) == len(names)
    assert best.cost_ns <= cost <= sequential
    again = _search.plan(problem, start=stages, exact=False, kicks=0, seconds=30.0)  # refuses what is not in order
    assert again.cost_ns <= cost


def test_pairs_give_the_same_stages_for_the_same_seed():
    problem = disturbed_problem_of(generate(Recipe(shape="align", num_modules=16, seed=1)))
    singles = [1 << index for index in range(16)]
    first, second = (_search.improve_by_pairs(problem, singles, kicks=1, seed=5, seconds=60.0) for _ in range(2))
    assert first == second
    assert first[1] < _search.plan(problem, seconds=0.0, exact=False).cost_ns


def test_pairs_refuse_stages_that_are_no_partition():
    problem = disturbed_problem_of(generate(Recipe(shape="chain", num_modules=3, seed=1)))
    for start in ([0b001, 0b010], [0b011, 0b110], [0b111]):
        with pytest.raises(ValueError, match="start"):
            _search.improve_by_pairs(problem, start)


def crossing() -> _search.Problem:
    """Two chains, a then x and b then y, of which only a and y, and b and x, fit side by side."""
    wide, narrow = [(1, 6, 10, 20, 0)], [(1, 4, 10, 20, 0)]
    a, b = _search.Module.of(wide, []), _search.Module.of(wide, [])
    return _search.Problem(
        [a, b, _search.Module.of(narrow, [0]), _search.Module.of(narrow, [1])], num_devices=1, num_slots=10
    )


def test_the_order_of_stages_rules_out_two_that_wait_for_each_other():
    """Prices hold two stages to be enough: a beside y, which waits for b, and b beside x, which waits for a."""
    by_prices, by_order = _search.bound_by_order(crossing())
    assert 55 <= by_prices <= 60
    assert 85 <= by_order <= _search.plan(crossing()).cost_ns == 90


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", ["layered", "multi"])
def test_a_bound_by_order_is_between_that_by_prices_and_the_best_plan(shape, seed):
    problem = disturbed_problem_of(generate(Recipe(shape=shape, num_modules=9, num_devices=4, seed=seed)))
    best = _search.plan(problem, seconds=60.0)
    by_prices, by_order = _search.bound_by_order(problem, seconds=60.0)
    assert best.status == "optimal"
    assert by_prices <= by_order <= best.cost_ns
    assert _search.bound_by_order(problem, seconds=60.0) == (by_prices, by_order)
    cut_off = _search.bound_by_order(problem, seconds=0.0)
    assert cut_off[0] <= cut_off[1] <= best.cost_ns


def test_modules_at_once_are_in_no_stage_without_each_other():
    """Where they could be, too, the third case of every split costs what its parent does, and the bound never rises."""
    instance = generate(Recipe(shape="layered", num_modules=64, num_devices=32, num_slots=16, seed=1))
    by_prices, by_order = _search.bound_by_order(disturbed_problem_of(instance), seconds=120.0)
    assert by_order > 1.02 * by_prices


def test_a_bound_by_order_is_no_higher_than_what_it_is_told_to_reach():
    assert _search.bound_by_order(crossing(), incumbent=70)[1] == 70
