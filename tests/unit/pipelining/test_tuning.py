"""Layer tuning: candidates of chunks, one rank's choice against the optimum, and simulated steps within memory."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from tuning_cases import one_f_one_b, run_in_order

from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.rank_memory import rank_timelines
from mosaic.pipelining.tasks import Deadlock, Orders, TaskGraph, Timed, Wait
from mosaic.pipelining.tuning import (
    Candidate,
    Candidates,
    MemoryShortage,
    Pair,
    RankPairs,
    Tuned,
    pairs_of,
    tune,
    with_candidates,
)
from mosaic.pipelining.workload.layers import Layer, Strategy

RAGGED = (1.0, 0.4, 1.6, 0.7, 1.3, 0.4, 1.0, 1.6)


def layer(*ways: tuple[float, float, int], workspace: int = 0) -> Layer:
    return Layer(
        forward_ms=1.0,
        backward_ms=1.0,
        weights_ms=1.0,
        strategies=tuple(
            Strategy(name="keep" if not at else "recompute", kept_bytes=k, extra_forward_ms=f, extra_backward_ms=b)
            for at, (f, b, k) in enumerate(ways)
        ),
        workspace_bytes=workspace,
    )


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    ways = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 50))
    return layer((0, 0, 60), *draw(st.lists(ways, max_size=3)), workspace=draw(st.integers(0, 9)))


def added(candidate: Candidate) -> int:
    return candidate.forward_ns + candidate.backward_ns


def all_sums(chunk: Sequence[Layer]) -> list[tuple[int, int]]:
    """(kept bytes, nanoseconds added) of every combination."""
    return [
        (
            sum(way.kept_bytes for way in ways),
            round(1e6 * math.fsum(way.extra_forward_ms + way.extra_backward_ms for way in ways)),
        )
        for ways in itertools.product(*(one.strategies for one in chunk))
    ]


@given(st.lists(layers(), min_size=1, max_size=5), st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_candidates_are_the_fastest_the_leanest_and_some_between_that_none_beats(
    chunk: list[Layer], count: int
) -> None:
    found = Candidates(count=count).of(chunk)
    sums = all_sums(chunk)
    front = sorted(s for s in set(sums) if not any(o != s and o[0] <= s[0] and o[1] <= s[1] for o in sums))
    assert len(found) <= count
    assert [(one.kept_bytes, added(one)) for one in found] == sorted(
        ((one.kept_bytes, added(one)) for one in found), reverse=True
    )
    assert (found[0].kept_bytes, added(found[0])) == front[-1]
    assert (found[-1].kept_bytes, added(found[-1])) == front[0]
    assert {(one.kept_bytes, added(one)) for one in found} <= set(front)


@given(st.lists(layers(), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_a_candidate_is_what_its_strategies_add_up_to_and_works_in_no_more_than_everything(chunk: list[Layer]) -> None:
    for one in Candidates(count=5).of(chunk):
        ways = [own.strategies[index] for own, index in zip(chunk, one.strategies, strict=True)]
        assert one.kept_bytes == sum(way.kept_bytes for way in ways)
        assert one.forward_ns == round(1e6 * math.fsum(way.extra_forward_ms for way in ways))
        last = max(chunk[-1].strategies[0].kept_bytes, ways[-1].kept_bytes)
        everything = sum(own.strategies[0].kept_bytes for own in chunk) + max(own.workspace_bytes for own in chunk)
        assert one.kept_bytes - ways[-1].kept_bytes + last <= one.kept_bytes + one.workspace_bytes <= everything


def test_of_layers_that_are_alike_the_last_ones_keep_theirs() -> None:
    half = next(c for c in Candidates(count=9).of([layer((0, 0, 100), (0, 1, 10))] * 8) if sum(c.strategies) == 4)
    assert half.strategies == (1, 1, 1, 1, 0, 0, 0, 0)
    assert half.workspace_bytes == 0


def test_where_backward_for_weights_is_apart_what_is_made_anew_is_in_use_until_it_ran() -> None:
    chunk = [layer((0, 0, 100), (0, 1, 10), workspace=7)] * 4
    together, apart = Candidates(count=5).of(chunk), Candidates(count=5, weights_apart=True).of(chunk)
    assert [one.kept_bytes + one.workspace_bytes for one in apart] == [407] * 5
    assert together[-1].kept_bytes + together[-1].workspace_bytes == 137


def test_a_chunk_of_many_unlike_layers_has_candidates_that_still_reach_from_fastest_to_leanest() -> None:
    chunk = [layer((0, 0, 1000 + 37 * at), (0, 1 + at / 7, 300 + 11 * at), (0, 3 + at / 3, 5 + at)) for at in range(24)]
    found = Candidates(count=16).of(chunk)
    assert len(found) == 16
    assert found[0].strategies == (0,) * 24
    assert found[-1].strategies == (2,) * 24


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ([layer((0, math.nan, 1))], "adds nan ms; use a finite time"),
        ([layer((-1.0, 0, 1))], "adds -1.0 ms"),
        ([layer((0, 0, -1))], "keeps -1 bytes"),
    ],
)
def test_what_no_layer_can_be_is_refused(chunk: list[Layer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Candidates().of(chunk)


def test_fewer_than_two_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="count=1"):
        Candidates(count=1)


def simulated(graph: TaskGraph, orders: Orders) -> Timed:
    timed = run_in_order(graph, orders)
    assert isinstance(timed, Timed)
    return timed


def peaks(graph: TaskGraph, timed: Timed) -> list[int]:
    return [line.peak_bytes for line in rank_timelines(graph, timed.start_ns)]


def makespan(graph: TaskGraph, pairs: list[Pair], orders: Orders, choice: list[int]) -> int:
    return simulated(with_candidates(graph, pairs, choice), orders).makespan_ns


@given(
    st.integers(1, 4),
    st.lists(st.sampled_from([0.4, 0.7, 1.0, 1.6]), min_size=1, max_size=7),
    st.floats(0.0, 1.1),
    st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_what_is_chosen_fits_and_ends_no_earlier_than_the_bound_and_no_later_than_the_leanest(
    num_ranks: int, sizes: list[float], share: float, seed: int
) -> None:
    graph, pairs, orders = one_f_one_b(num_ranks, sizes, limit_share=share, seed=seed)
    tuned = tune(graph, pairs, functools.partial(run_in_order, orders=orders))
    leanest = with_candidates(graph, pairs, [pair.leanest for pair in pairs])
    at_leanest = simulated(leanest, orders)
    fits = all(used <= limit for used, limit in zip(peaks(leanest, at_leanest), graph.limit_bytes, strict=True))
    assert isinstance(tuned, Tuned if fits else MemoryShortage)
    if isinstance(tuned, Tuned):
        again = simulated(with_candidates(graph, pairs, tuned.choice), orders)
        assert again.makespan_ns == tuned.timed.makespan_ns
        assert all(used <= limit for used, limit in zip(peaks(tuned.graph, again), graph.limit_bytes, strict=True))
        assert tuned.bound_ns <= again.makespan_ns <= at_leanest.makespan_ns
        assert tuned.bound_ns == makespan(graph, pairs, orders, [pair.fastest for pair in pairs])


def test_where_memory_is_ample_everything_is_kept_and_the_bound_is_met() -> None:
    graph, pairs, orders = one_f_one_b(3, RAGGED, limit_share=1.2)
    tuned = tune(graph, pairs, functools.partial(run_in_order, orders=orders))
    assert isinstance(tuned, Tuned)
    assert set(tuned.choice) == {0}
    assert tuned.timed.makespan_ns == tuned.bound_ns


def test_no_choice_of_a_small_step_ends_much_earlier_than_the_one_found() -> None:
    graph, pairs, orders = one_f_one_b(2, (1.0, 0.4, 1.6), num_candidates=3, limit_share=0.3, seed=4)
    tuned = tune(graph, pairs, functools.partial(run_in_order, orders=orders))
    assert isinstance(tuned, Tuned)
    best = tuned.timed.makespan_ns
    for choice in itertools.product(range(3), repeat=len(pairs)):
        altered = with_candidates(graph, pairs, choice)
        timed = simulated(altered, orders)
        if all(used <= limit for used, limit in zip(peaks(altered, timed), graph.limit_bytes, strict=True)):
            best = min(best, timed.makespan_ns)
    assert tuned.timed.makespan_ns <= best * 1.02


def test_weights_by_slack_lose_less_than_half_of_what_equal_weights_lose() -> None:
    lost = {1: 0, 8: 0}
    for seed, rounds in itertools.product(range(3), lost):
        graph, pairs, orders = one_f_one_b(4, RAGGED * 2, limit_share=0.2, seed=seed)
        run = functools.partial(run_in_order, orders=orders)
        if rounds == 1:  # every task as if the step waited for it
            tuned = tune(graph, pairs, lambda given, run=run: spread(given, run), rounds=1)
            assert isinstance(tuned, Tuned)
            ended = makespan(graph, pairs, orders, list(tuned.choice))
        else:
            tuned = tune(graph, pairs, run, rounds=rounds)
            assert isinstance(tuned, Tuned)
            ended = tuned.timed.makespan_ns
        lost[rounds] += ended - makespan(graph, pairs, orders, [0] * len(pairs))
    assert lost[8] < 0.5 * lost[1]


def spread(graph: TaskGraph, run: functools.partial[Timed | Deadlock]) -> Timed | Deadlock:
    """All tasks one after the other in the order of their starts, so that none has slack."""
    timed = run(graph)
    assert isinstance(timed, Timed)
    order = sorted(range(len(graph.tasks)), key=lambda i: (timed.start_ns[i], i))
    ends = list(itertools.accumulate(graph.tasks[i].time_ns + 10_000 for i in order))
    start = dict(zip(order, [0, *ends[:-1]], strict=True))
    return Timed(start_ns=[start[i] for i in range(len(order))], makespan_ns=ends[-1], peak_bytes=timed.peak_bytes)


def test_memory_that_nothing_fits_names_rank_time_amount_and_help() -> None:
    graph, pairs, orders = one_f_one_b(3, RAGGED, limit_share=1.0)
    limits = (graph.limit_bytes[0], 300_000_000, graph.limit_bytes[2])
    short = tune(replace(graph, limit_bytes=limits), pairs, functools.partial(run_in_order, orders=orders))
    assert isinstance(short, MemoryShortage)
    assert short.rank == 1
    assert short.num_fitting < short.num_pairs
    said = str(short)
    assert "rank 1 is short of" in said
    assert "0.3 GB" in said
    assert "ms into the step" in said
    assert f"at most {short.num_fitting} pieces" in said
    enough = replace(graph, limit_bytes=(limits[0], limits[1] + short.short_bytes, limits[2]))
    assert isinstance(tune(enough, pairs, functools.partial(run_in_order, orders=orders)), Tuned)


def test_state_that_is_larger_than_memory_is_said_to_be_that() -> None:
    graph, pairs, orders = one_f_one_b(2, (1.0,))
    short = tune(replace(graph, limit_bytes=(10, 0)), pairs, functools.partial(run_in_order, orders=orders))
    assert isinstance(short, MemoryShortage)
    assert short.rank == 0
    assert "weights, gradients and optimizer's state alone" in str(short)


def test_an_order_that_cannot_run_is_handed_on_as_that() -> None:
    graph, pairs, orders = one_f_one_b(2, (1.0, 1.0))
    backwards = tuple(tuple(reversed(own)) for own in orders)
    assert isinstance(tune(graph, pairs, functools.partial(run_in_order, orders=backwards)), Deadlock)


def test_what_a_graph_has_counted_already_is_not_counted_twice() -> None:
    graph, pairs, orders = one_f_one_b(3, RAGGED, limit_share=0.25)
    kept = with_candidates(graph, pairs, [0] * len(pairs))
    counted = [replace(pair, counted=pair.candidates[0]) for pair in pairs]
    run = functools.partial(run_in_order, orders=orders)
    plain, other = tune(graph, pairs, run), tune(kept, counted, run)
    assert isinstance(plain, Tuned)
    assert isinstance(other, Tuned)
    assert plain.choice == other.choice
    assert plain.graph == other.graph


def test_pairs_are_found_in_a_graph_that_keeps_everything_also_with_weights_apart() -> None:
    graph, pairs, orders = one_f_one_b(2, (1.0, 0.7), limit_share=0.1)
    kept = with_candidates(graph, pairs, [0] * len(pairs))
    own = {pair.forward: pair for pair in pairs}
    found = pairs_of(kept, lambda task: own[kept.tasks.index(task)].candidates)
    assert {pair.forward: (pair.backward, pair.weights) for pair in found} == {
        pair.forward: (pair.backward, None) for pair in pairs
    }
    run = functools.partial(run_in_order, orders=orders)
    plain, other = tune(graph, pairs, run), tune(kept, found, run)
    assert isinstance(plain, Tuned)
    assert isinstance(other, Tuned)
    assert plain.timed.makespan_ns == other.timed.makespan_ns
    assert any(plain.choice)
    # the first pair's backward for weights as a task of its own, which frees what the forward keeps
    first = found[0]
    tasks = list(kept.tasks)
    backward = tasks[first.backward]
    apart = replace(backward, kind=ActionKind.WEIGHTS, time_ns=5, takes_bytes=0)
    tasks[first.backward] = replace(backward, frees_bytes=0)
    split = replace(
        kept, tasks=(*tasks, apart), waits=(*kept.waits, Wait(source=first.backward, target=len(tasks), lag_ns=0))
    )
    first = pairs_of(split, lambda _: first.candidates)[0]
    assert first.weights == first.last == len(tasks)
    leaner = with_candidates(split, [first], [5])
    saved = first.candidates[0].kept_bytes - first.candidates[5].kept_bytes
    assert leaner.tasks[first.last].frees_bytes == split.tasks[first.last].frees_bytes - saved + (
        first.candidates[5].workspace_bytes
    )


def test_lanes_of_a_rank_share_its_memory_even_though_times_alter_what_overlaps() -> None:
    graph, pairs, orders = one_f_one_b(4, RAGGED, limit_share=0.25, seed=2)
    total = sum(graph.limit_bytes) // 2
    lanes = replace(graph, rank_of=(0, 0, 0, 0), base_bytes=(0,), limit_bytes=(total,))
    tuned = tune(lanes, pairs, functools.partial(run_in_order, orders=orders))
    assert isinstance(tuned, Tuned)
    assert peaks(tuned.graph, tuned.timed)[0] <= total
    assert any(tuned.choice)


@pytest.mark.parametrize(("sizes", "share"), [(RAGGED, 0.2), (RAGGED, 0.45), (RAGGED[:5], 0.1), (RAGGED * 2, 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_choice_of_a_rank_is_near_the_optimum_of_the_added_time(
    sizes: Sequence[float], share: float, seed: int
) -> None:
    graph, pairs, orders = one_f_one_b(4, sizes, limit_share=share, seed=seed)
    fastest = with_candidates(graph, pairs, [pair.fastest for pair in pairs])
    own = RankPairs(graph, pairs, 0)
    own.instants.append(own.snapshot(fastest, simulated(fastest, orders).start_ns))
    weights = {task: random.Random(task).uniform(0.02, 1) for task in range(len(graph.tasks))}
    chosen = own.select(weights)
    assert chosen is not None
    rows = [
        (weights[pair.backward] * candidate.backward_ns, number, candidate)
        for number, pair in enumerate(own.pairs)
        for candidate in pair.candidates
    ]
    instants = own.instants[0]
    uses = np.array(
        [
            instants.holds[:, number] * candidate.kept_bytes
            + instants.works[:, number] * (candidate.kept_bytes + candidate.workspace_bytes)
            for _, number, candidate in rows
        ]
    ).T
    once = np.array([[float(number == pair) for _, number, _ in rows] for pair in range(len(own.pairs))])
    optimum = milp(
        [cost for cost, _, _ in rows],
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(uses / 1e6, -math.inf, instants.room / 1e6)],
        bounds=Bounds(0, 1),
        integrality=np.ones(len(rows)),
    )
    assert optimum.status == 0
    cost = sum(
        weights[pair.backward] * pair.candidates[at].backward_ns for pair, at in zip(own.pairs, chosen, strict=True)
    )
    assert optimum.fun <= cost * (1 + 1e-6)
    assert cost <= 1.15 * optimum.fun + 1
