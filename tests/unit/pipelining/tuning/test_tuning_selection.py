"""The choice for a rank's pairs against a mixed-integer solver, and instants of memory against all instants."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from mosaic import _search

Columns = tuple[list[int], list[int], list[int], list[int]]
Snapshot = tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]


def pairs_of(drawn: random.Random, count: int, choices: int) -> list[Columns]:
    """Choices that keep from all to an eighth and add up to a forward, not quite smoothly."""
    made = []
    for _ in range(count):
        size = drawn.choice((1.0, 2.5)) * drawn.uniform(0.6, 1.4)
        shares = [at / (choices - 1) for at in range(choices)]
        kept = [int(1e6 * size * (1 - 0.88 * share)) for share in shares]
        added = [int(1e6 * size * share**2 * drawn.uniform(0.85, 1.15)) for share in shares]
        made.append(([0] * choices, added, kept, [(kept[0] - one) // 8 for one in kept]))
    return made


def overlapping(drawn: random.Random, count: int, flying: int) -> Snapshot:
    """Spans of so many pairs in flight at most, as on a rank that runs one task at a time."""
    now, started, flight = 0, 0, list[int]()
    spans: dict[int, tuple[int, int, int, int]] = {}
    forward: dict[int, tuple[int, int]] = {}
    while started < count or flight:
        took = drawn.randint(5, 20)
        if started < count and (len(flight) < flying or drawn.random() < 0.2):
            forward[started] = now, now + took
            flight.append(started)
            started += 1
        else:
            pair = flight.pop(drawn.randrange(min(3, len(flight))))
            spans[pair] = (*forward[pair], now, now + took)
        now += took
    return [spans[pair] for pair in range(count)], [(0, 1000)]


def used(columns: list[Columns], snapshot: Snapshot, chosen: list[int], at: int) -> int:
    spans, changes = snapshot
    total = sum(size for when, size in changes if when <= at)
    for (_, _, kept, works), (start, forward_end, backward_start, end), index in zip(
        columns, spans, chosen, strict=True
    ):
        if start <= at < end:
            total += kept[index] + (works[index] if at < forward_end or at >= backward_start else 0)
    return total


def peak(columns: list[Columns], snapshot: Snapshot, chosen: list[int]) -> int:
    instants = {at for span in snapshot[0] for at in span} | {at for at, _ in snapshot[1]}
    return max(used(columns, snapshot, chosen, at) for at in instants)


def case(seed: int, count: int, choices: int, flying: int, tight: float) -> tuple[list[Columns], Snapshot, int]:
    drawn = random.Random(seed)
    columns, snapshot = pairs_of(drawn, count, choices), overlapping(drawn, count, flying)
    lean, fast = (peak(columns, snapshot, [index] * count) for index in (choices - 1, 0))
    return columns, snapshot, int(lean + tight * (fast - lean))


def best_cost(columns: list[Columns], snapshot: Snapshot, limit: int, *, weights: list[float]) -> float:
    """The optimum by HiGHS, over every instant at which anything starts."""
    instants = sorted({at for span in snapshot[0] for at in (span[0], span[2])})
    choices = len(columns[0][2])
    variables = [(pair, index) for pair in range(len(columns)) for index in range(choices)]
    cost = [weights[pair] * (columns[pair][0][index] + columns[pair][1][index]) for pair, index in variables]
    memory = np.zeros((len(instants), len(variables)))
    for row, at in enumerate(instants):
        for column, (pair, index) in enumerate(variables):
            start, forward_end, backward_start, end = snapshot[0][pair]
            if start <= at < end:
                works = at < forward_end or at >= backward_start
                memory[row, column] = columns[pair][2][index] + works * columns[pair][3][index]
    one_each = np.kron(np.eye(len(columns)), np.ones(choices))
    base = sum(size for _, size in snapshot[1])
    found = milp(
        cost,
        constraints=[
            LinearConstraint(csr_matrix(one_each), 1, 1),
            LinearConstraint(csr_matrix(memory / 1e6), ub=(limit - base) / 1e6),
        ],
        bounds=Bounds(0, 1),
        integrality=np.ones(len(variables)),
        options={"mip_rel_gap": 0.0, "time_limit": 20},
    )
    assert found.status == 0
    return float(found.fun)


@pytest.mark.parametrize("tight", [0.35, 0.6])
@pytest.mark.parametrize("count", [64, 128])
def test_many_pairs_are_within_three_percent_of_the_added_time_by_the_bound_of_the_choice_itself(
    count: int, tight: float
) -> None:
    for seed, choices in ((0, 8), (1, 16)):
        columns, snapshot, limit = case(seed, count, choices, 8 + 8 * seed, tight)
        ones = [1.0] * count
        found = _search.PairTable(columns).select(
            [snapshot], limit_bytes=limit, forward_weights=ones, backward_weights=ones, gap=0.03
        )
        assert found.fits
        assert 0 < found.bound_ns <= found.cost_ns <= 1.03 * found.bound_ns
        assert peak(columns, snapshot, found.chosen) <= limit
        assert found.cost_ns == sum(columns[pair][1][index] for pair, index in enumerate(found.chosen))


@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from([2, 4]), st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_bound_optimum_and_choice_come_in_this_order(seed: int, count: int, choices: int, tight: int) -> None:
    columns, snapshot, limit = case(seed, count, choices, 4, tight / 20)  # HiGHS fails within its tolerance of a limit
    weights = [random.Random(seed).uniform(0.02, 1) for _ in range(count)]
    found = _search.PairTable(columns).select(
        [snapshot], limit_bytes=limit, forward_weights=weights, backward_weights=weights
    )
    optimum = best_cost(columns, snapshot, limit, weights=weights)
    slop = 1e-6 * optimum + 1e-3
    assert found.fits
    assert peak(columns, snapshot, found.chosen) <= limit
    assert found.bound_ns <= optimum + slop
    assert optimum <= found.cost_ns + slop


@pytest.mark.parametrize(("count", "flying"), [(20, 7), (24, 3)])
def test_the_choice_is_near_the_optimum_of_the_added_time(count: int, flying: int) -> None:
    columns, snapshot, limit = case(3, count, 6, flying, 0.4)
    ones = [1.0] * count
    found = _search.PairTable(columns).select(
        [snapshot], limit_bytes=limit, forward_weights=ones, backward_weights=ones
    )
    assert found.cost_ns <= 1.03 * best_cost(columns, snapshot, limit, weights=ones)


@given(st.integers(0, 10**6), st.integers(1, 10), st.floats(-0.2, 1.1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_instants_that_are_left_out_hold_wherever_those_that_stay_do(
    seed: int, count: int, tight: float, shared: bool
) -> None:
    columns, snapshot, limit = case(seed, count, 3, 4, tight)
    if shared:  # a workspace that every choice needs
        columns = [(forward, backward, kept, [7] * 3) for forward, backward, kept, _ in columns]
    drawn = random.Random(seed)
    snapshot[1].extend((drawn.randint(0, 300), drawn.choice((-500, 90_000))) for _ in range(3))
    rows = _search.PairTable(columns).rows([snapshot], limit_bytes=limit)
    chosen = [drawn.randrange(3) for _ in range(count)]
    holds = all(
        sum(columns[pair][2][chosen[pair]] for pair in (*holding, *working))
        + sum(columns[pair][3][chosen[pair]] for pair in working)
        <= room
        for _, room, holding, working in rows
    )
    assert holds == (peak(columns, snapshot, chosen) <= limit)


def test_the_same_question_has_the_same_answer_and_weights_move_what_is_added() -> None:
    columns, snapshot, limit = case(5, 16, 8, 6, 0.4)
    table = _search.PairTable(columns)

    def chosen(weights: list[float]) -> list[int]:
        found = table.select([snapshot], limit_bytes=limit, forward_weights=weights, backward_weights=weights)
        assert found.fits
        return found.chosen

    assert chosen([1.0] * 16) == chosen([1.0] * 16)
    dear = sum(chosen([1.0] * 8 + [0.02] * 8)[:8])
    cheap = sum(chosen([0.02] * 8 + [1.0] * 8)[:8])
    assert dear < cheap


def test_memory_that_nothing_fits_is_said_with_its_instant_and_what_is_missing() -> None:
    columns, snapshot, _ = case(7, 12, 4, 5, 0.0)
    leanest = [3] * 12
    limit = peak(columns, snapshot, leanest) - 100
    found = _search.PairTable(columns).select(
        [snapshot], limit_bytes=limit, forward_weights=[1.0] * 12, backward_weights=[1.0] * 12
    )
    assert not found.fits
    assert found.chosen == leanest
    assert found.short_bytes == 100
    assert used(columns, snapshot, leanest, found.at_ns) == limit + 100


def test_columns_of_unlike_lengths_and_missing_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="four columns of one length"):
        _search.PairTable([([0], [0], [1, 2], [0, 0])])
    table = _search.PairTable([([0], [0], [1], [0])])
    with pytest.raises(ValueError, match="0 forward weights for 1 pairs"):
        table.select([], limit_bytes=1, forward_weights=[], backward_weights=[1.0])
