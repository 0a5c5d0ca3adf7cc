"""Layer tuning of a simulated step: memory holds, the bound bounds, and what is short is said."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_cases import candidate, one_f_one_b, run_in_order

from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.rank_memory import rank_timelines
from mosaic.pipelining.tasks import Deadlock, Orders, TaskGraph, Timed, Wait
from mosaic.pipelining.tuning.candidates import Candidate
from mosaic.pipelining.tuning.pairs import Pair, pairs_of, with_candidates
from mosaic.pipelining.tuning.shortage import MemoryShortage
from mosaic.pipelining.tuning.slack import Followers
from mosaic.pipelining.tuning.tune import Tuned, tune

RAGGED = (1.0, 0.4, 1.6, 0.7, 1.3, 0.4, 1.0, 1.6)


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
@settings(max_examples=40, deadline=None)
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


def test_slack_is_how_much_longer_each_task_may_take_and_not_more() -> None:
    graph, _, orders = one_f_one_b(3, RAGGED[:4])
    timed = simulated(graph, orders)
    slack = Followers.of(graph).slack_ns(graph, timed)
    assert min(slack) == 0
    assert max(slack) > 0
    for index, own in enumerate(slack):
        for more, later in ((own, False), (own + 1, True)):
            tasks = list(graph.tasks)
            tasks[index] = replace(tasks[index], time_ns=tasks[index].time_ns + more)
            ended = simulated(replace(graph, tasks=tuple(tasks)), orders).makespan_ns
            assert (ended > timed.makespan_ns) == later


def test_memory_that_nothing_fits_names_rank_time_amount_and_help() -> None:
    graph, pairs, orders = one_f_one_b(3, RAGGED, limit_share=1.0)
    limits = (graph.limit_bytes[0], 300_000_000, graph.limit_bytes[2])
    short = tune(replace(graph, limit_bytes=limits), pairs, functools.partial(run_in_order, orders=orders))
    assert isinstance(short, MemoryShortage)
    assert short.rank == 1
    assert short.num_fitting < short.num_pairs
    assert short.is_proven
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


def one(kept: int = 1) -> tuple[Candidate, ...]:
    return (candidate(0, kept),)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([Pair(forward=0, backward=99, candidates=one())], "task 99; the graph has 4"),
        ([Pair(forward=0, backward=2, candidates=one())], "on several ranks"),
        ([Pair(forward=0, backward=3, candidates=one())] * 2, "task 0 is in pairs 0 and 1"),
        ([Pair(forward=0, backward=3, candidates=one(), counted=one(5)[0])], "counts less than its pair"),
    ],
)
def test_pairs_that_are_not_of_the_graph_are_refused(pairs: list[Pair], message: str) -> None:
    graph, _, orders = one_f_one_b(2, (1.0,))
    with pytest.raises(ValueError, match=message):
        tune(graph, pairs, functools.partial(run_in_order, orders=orders))


def test_no_rounds_and_no_candidates_are_refused() -> None:
    graph, pairs, orders = one_f_one_b(2, (1.0,))
    with pytest.raises(ValueError, match="rounds=0"):
        tune(graph, pairs, functools.partial(run_in_order, orders=orders), rounds=0)
    with pytest.raises(ValueError, match="no candidates"):
        Pair(forward=0, backward=1, candidates=())
