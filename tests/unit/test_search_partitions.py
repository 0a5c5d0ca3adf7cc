"""Stages listed by what they take above their modules' prices, and the cheapest partition into such stages."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from bench.solver.generate import SHAPES, Recipe, generate

from mosaic import _search
from tests.property.test_pattern_laws import disturbed_problem_of

NEVER = (2**63 - 1) // 4
Order = list[list[int]]  # by module: those that it waits for


def problem_of(before: Order) -> _search.Problem:
    modules = [_search.Module.of([(1, 1, 5, 5, 0)], others) for others in before]
    return _search.Problem(modules, num_devices=1, num_slots=len(before))


def partitions(done: int, before: Order, columns: dict[int, int]) -> Iterator[tuple[int, ...]]:
    """All ways to put stages one after the other; a stage starts when all that its modules wait for is done."""
    everything = (1 << len(before)) - 1
    if done == everything:
        yield ()
        return
    for stage in columns:
        needed = {other for m, others in enumerate(before) if stage >> m & 1 for other in others}
        if stage & done or any(not done >> other & 1 for other in needed):
            continue
        for rest in partitions(done | stage, before, columns):
            yield (stage, *rest)


def least_of(before: Order, columns: dict[int, int], slack: int) -> int:
    found = (sum(columns[stage] for stage in stages) for stages in partitions(0, before, columns))
    return min(min(found, default=NEVER), slack)


def drawn(draw: random.Random) -> tuple[Order, dict[int, int]]:
    size = draw.randint(2, 6)
    is_free = draw.random() < 0.4
    before = [[] if is_free else [m for m in range(n) if draw.random() < 0.2] for n in range(size)]
    columns = {stage: draw.randint(0, 30) for stage in range(1, 1 << size) if draw.random() < 0.4}
    return before, columns


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("disturbed", [False, True])
def test_all_sets_that_take_little_more_than_their_modules_are_worth_are_listed(shape, disturbed):
    problem = disturbed_problem_of(
        generate(Recipe(shape=shape, num_modules=8, num_devices=4, disturbed=disturbed, seed=4))
    )
    for slack in (10_000, 3_000_000, 30_000_000):
        prices, found, is_whole = _search.list_patterns(problem, slack)
        assert is_whole
        listed = {}
        for stage in range(1, 1 << 8):
            worth = sum(price for m, price in enumerate(prices[:8]) if stage >> m & 1)
            takes = _search.together(problem, stage)
            if stage in found or takes <= worth + slack:
                listed[stage] = takes
            if _is_free(problem, stage):
                assert worth <= takes
        assert {stage: takes for stage, takes in listed.items() if _is_free(problem, stage)} == found


def _is_free(problem: _search.Problem, stage: int) -> bool:
    """Whether a set may be a stage: no partition in which it is one is refused."""
    size = 8
    columns = {1 << m: 0 for m in range(size)} | {stage: 0}
    for m in range(size):
        if stage.bit_count() > 1 and stage >> m & 1:
            del columns[1 << m]
    return bool(_search.cheapest_partitions(problem, columns, 1)[0][1])


def test_a_list_that_is_too_long_says_so():
    problem = disturbed_problem_of(generate(Recipe(shape="align", num_modules=8, num_devices=4, seed=4)))
    _, found, is_whole = _search.list_patterns(problem, 10**9)
    assert is_whole
    assert not _search.list_patterns(problem, 10**9, most=len(found) - 1)[2]
    assert _search.list_patterns(problem, 10**9, most=len(found))[2]


@pytest.mark.parametrize("seed", range(60))
def test_the_cheapest_partition_is_the_least_of_all_and_stays_so_as_stages_get_dearer(seed):
    draw = random.Random(seed)
    before, columns = drawn(draw)
    slack = draw.randint(20, 120)
    columns = {stage: cost for stage, cost in columns.items() if cost <= slack}
    raises = [(stage, draw.randint(0, 60)) for stage in columns for _ in range(2)]
    draw.shuffle(raises)
    raises = raises[:6]
    problem = problem_of(before)
    answers = _search.cheapest_partitions(problem, columns, slack, raises)
    assert len(answers) == len(raises) + 1
    for answer, raised in zip(answers, [None, *raises], strict=True):
        if raised is not None:
            columns[raised[0]] = max(columns[raised[0]], raised[1])
        least, stages = answer
        assert least == least_of(before, columns, slack)
        assert bool(stages) == (least < slack)
        if stages:
            assert sum(columns[stage] for stage in stages) == least
            assert tuple(stages) in set(partitions(0, before, columns))
    assert _search.cheapest_partitions(problem, dict(reversed(columns.items())), slack)[0] == answers[-1]


def test_stages_that_wait_for_each_other_are_no_partition():
    """Module 2 waits for 0, and 3 for 1: {0, 3} and {1, 2} would each have to come first."""
    problem = problem_of([[], [], [0], [1]])
    assert _search.cheapest_partitions(problem, {0b1001: 0, 0b0110: 0}, 9) == [(9, [])]
    assert _search.cheapest_partitions(problem, {0b0011: 2, 0b1100: 3}, 9) == [(5, [0b0011, 0b1100])]


def test_twenty_parallel_modules_on_many_devices_are_proven_by_partitions_and_the_same_twice():
    problem = disturbed_problem_of(generate(Recipe(shape="star", num_modules=20, num_devices=32, seed=1)))
    first, second = (_search.plan(problem, kicks=0, seconds=60.0) for _ in range(2))
    assert first.status == second.status == "optimal"
    assert first.bound_ns == first.cost_ns == second.cost_ns
    assert [stage.rows for stage in first.stages] == [stage.rows for stage in second.stages]


def test_stages_that_nothing_is_told_of_as_a_whole_are_settled_by_ranges_of_their_times():
    problem = disturbed_problem_of(generate(Recipe(shape="align", num_modules=20, num_devices=32, seed=2)))
    found = _search.plan(problem, kicks=0, seconds=20.0)
    assert found.status == "optimal"
    assert found.cost_ns == found.bound_ns
