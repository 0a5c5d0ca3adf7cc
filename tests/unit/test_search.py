"""The exact search where its limits end it: bounds stay true, time is kept, what was proven stays proven."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.solver.generate import SHAPES, Recipe, generate
from bench.solver.runs import search

from mosaic import _search


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("disturbed", [False, True])
def test_a_bound_given_early_is_never_above_what_a_longer_search_proves(shape, disturbed):
    """Six modules behind a backbone are enough for what comes before and after it to be judged apart."""
    made = generate(Recipe(shape=shape, num_modules=7, num_devices=4, disturbed=disturbed, seed=5))
    proven = search(made, seconds=60)
    assert proven.is_proven
    for seconds in (0.0, 1e-4, 1e-3, 1e-2):
        early = search(made, seconds=seconds)
        assert early.bound_ms <= proven.cost_ms * (1 + 1e-9) <= early.cost_ms * (1 + 2e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_star_takes_as_long_as_its_encoders_without_it_and_then_its_backbone(seed):
    """A bound that counted what follows twice once called 944.4 ms optimal where there was a plan of 935.8 ms."""
    star = generate(Recipe(shape="star", num_modules=10, seed=seed))
    *encoders, backbone = star.modules
    whole, parallel = search(star, seconds=60), search(replace(star, modules=tuple(encoders)), seconds=60)
    assert whole.is_proven
    assert parallel.is_proven
    alone_ms = min(option.forward_ms + option.backward_ms for option in backbone.options)
    assert whole.cost_ms == pytest.approx(parallel.cost_ms + alone_ms, rel=1e-9)


@pytest.mark.timeout(60)  # questions about one stage used to run on for minutes after the limit
@pytest.mark.parametrize("shape", ["align", "star", "layered"])
def test_a_search_that_is_cut_off_keeps_its_time_and_has_a_plan_and_a_bound(shape):
    made = generate(Recipe(shape=shape, num_modules=40, num_devices=32, tight_memory=True))
    found = search(made, seconds=0.5)
    assert 0 < found.bound_ms <= found.cost_ms


@pytest.mark.timeout(60)
def test_disturbed_modules_do_not_keep_a_search_beyond_its_limit():
    made = generate(Recipe(shape="star", num_modules=10, disturbed=True))
    found = search(made, seconds=0.5)
    assert found.bound_ms <= found.cost_ms


def problem(rows: list[list[tuple[int, int, int, int, int]]]) -> _search.Problem:
    """Modules that depend on nothing, on one device of ten slots."""
    return _search.Problem([_search.Module.of(each, []) for each in rows], num_devices=1, num_slots=10)


def test_a_module_gets_more_slots_than_it_needs_where_that_makes_it_a_milder_neighbour():
    """Measured pairs need not get worse with slots; the search once took for granted that they do."""
    made = problem([[(1, 2, 10, 0, 0), (1, 8, 10, 0, 0)], [(1, 2, 10, 0, 0)]])
    made.disturb_by_shares([(1, 0, [[0.5, 0.0]])], [])
    best = _search.plan(made)
    assert (best.status, best.cost_ns, len(best.stages)) == ("optimal", 10, 1)
    assert {placed.module: placed.option for placed in best.stages[0].placed} == {0: 1, 1: 0}


@pytest.mark.parametrize("objective", ["sum", "phases"])
def test_shares_of_the_time_alone_say_the_same_as_a_table_of_nanoseconds(objective):
    rows = [[(1, 3, 12, 30, 0), (1, 6, 8, 20, 0)], [(1, 4, 10, 20, 0), (1, 5, 9, 16, 0)]]
    plans = []
    for by_shares in (True, False):
        modules = [_search.Module.of(each, []) for each in rows]
        made = _search.Problem(modules, num_devices=1, num_slots=10, objective=objective)
        if by_shares:
            made.disturb_by_shares([(0, 1, [[0.25, 0.5], [0.5, 0.75]])], [(1, 0, [[0.1, 0.2], [0.25, 0.5]])])
        else:
            forward, backward = ([[[0] * 22 for _ in range(2)] for _ in range(2)] for _ in range(2))
            forward[0][0][11 + 4], forward[0][0][11 + 5] = 3, 6
            forward[0][1][11 + 4], forward[0][1][11 + 5] = 4, 6
            backward[1][0][3], backward[1][0][6] = 2, 4
            backward[1][1][3], backward[1][1][6] = 4, 8
            made.disturb_by_pairs(forward, backward)
        found = _search.plan(made)
        plans.append((found.status, found.cost_ns, [(s.forward_ns, s.backward_ns) for s in found.stages]))
    assert plans[0] == plans[1]
    assert plans[0][0] == "optimal"


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([(2, 0, [[0.0]])], "module 2 beside 0; there are 2"),
        ([(0, 1, [[0.0]] * 2)], "have 2 rows; give one for each of its 1"),
        ([(0, 1, [[0.0, 0.0]])], "need 1 entries a row"),
        ([(0, 1, [[-0.1]])], "finite and not negative"),
        ([(0, 1, [[float("nan")]])], "finite and not negative"),
    ],
)
def test_shares_that_do_not_fit_the_modules_are_refused(shares, message):
    made = problem([[(1, 2, 10, 0, 0)], [(1, 2, 10, 0, 0)]])
    with pytest.raises(ValueError, match=message):
        made.disturb_by_shares(shares, [])


def test_a_search_that_is_not_cut_off_gives_the_same_answer_again():
    made = generate(Recipe(shape="align", num_modules=8, disturbed=True, seed=1))
    first, second = search(made, seconds=60), search(made, seconds=60)
    assert first.is_proven
    assert (first.cost_ms, first.bound_ms) == (second.cost_ms, second.bound_ms)


def drawing(*options: tuple[int, float, float, float]) -> _search.Module:
    """A module after none: of each option its quota, bandwidth, idle part and cap, alike in both phases."""
    return _search.Module(
        [
            _search.Option(
                degree=1,
                quota=quota,
                forward_ns=10,
                backward_ns=10,
                forward_bandwidth=share,
                backward_bandwidth=share,
                idle=(idle, idle),
                cap=(cap, cap),
            )
            for quota, share, idle, cap in options
        ],
        [],
    )


LEVEL = (1.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("options", "level", "message"),
    [
        ([(2, 0.5, 0, 0.9), (4, 0.4, 0, 0.9)], LEVEL, "draws less bandwidth at quota 4 than at 2"),
        ([(2, 0.4, 0, 0.9), (4, 0.4, 0, 0.8)], LEVEL, "draws less bandwidth at quota 4 than at 2"),
        ([(2, 0.4, 0, 0.9), (4, 0.4, 0.2, 0.9)], LEVEL, "draws less bandwidth at quota 4 than at 2"),
        ([(2, 0.4, 0, 0.9), (2, 0.5, 0, 0.9)], LEVEL, "draws less bandwidth at quota 2 than at 2"),
        ([(2, 0.5, 0, 0.4)], LEVEL, "draws more than its slots can"),
        ([(2, -0.5, 0, 0.4)], LEVEL, "below 0 or without end"),
        ([(2, float("nan"), 0, 0.4)], LEVEL, "below 0 or without end"),
        ([(2, 0.5, 1.0, 0.9)], LEVEL, "nothing all the time"),
        ([(2, 0.5, 0, 0.9)], (0.0, 0.5, 0.0), "capacity is above 0"),
        ([(2, 0.5, 0, 0.9)], (1.0, 1.5, 0.0), "fairness from 0 to 1"),
        ([(2, 0.5, 0, 0.9)], (1.0, 0.5, -1.0), "cache not negative"),
    ],
)
def test_what_our_form_is_not_searched_with_is_refused(options, level, message):
    made = _search.Problem([drawing(*options)], num_devices=1, num_slots=10)
    with pytest.raises(ValueError, match=message):
        made.disturb_by_level(LEVEL, level)


@pytest.mark.parametrize(
    ("options", "coefficients", "message"),
    [
        ([(2, 0.5, 0, 0), (4, 0.4, 0, 0)], (0.0, 1.0, 1.0), "draws less bandwidth at quota 4 than at 2"),
        ([(2, 0.5, 0, 0)], (0.0, -1.0, 1.0), "e2 and e3 not negative"),
        ([(2, 0.5, 0, 0)], (0.0, 1.0, -1.0), "e2 and e3 not negative"),
        ([(2, 0.5, 0, 0)], (float("inf"), 1.0, 1.0), "are finite"),
    ],
)
def test_what_equation_8_is_not_searched_with_is_refused(options, coefficients, message):
    made = _search.Problem([drawing(*options)], num_devices=1, num_slots=10)
    with pytest.raises(ValueError, match=message):
        made.disturb_by_bandwidth((0.0, 1.0, 1.0), coefficients)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        ([[[0] * 22]], "no table, or more than one"),
        ([[[0] * 22] * 2, [[0] * 22]], "2 rows of pairs; give one for each of its 1"),
        ([[[0] * 21], [[0] * 22]], "21 entries; it needs 22"),
        ([[[0] * 22], [[0] * 21 + [-1]]], "makes it faster"),
    ],
)
def test_tables_of_pairs_that_do_not_fit_the_modules_are_refused(forward, message):
    made = problem([[(1, 2, 10, 0, 0)], [(1, 2, 10, 0, 0)]])
    with pytest.raises(ValueError, match=message):
        made.disturb_by_pairs(forward, [])
