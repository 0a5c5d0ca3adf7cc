"""Searches for orders: the optimum on small steps, never worse than the natural order, the same answer again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_graph_cases import random_step

from mosaic.pipelining.orders import METHODS, OrderLimits, Searched, search_orders
from mosaic.pipelining.tasks import Deadlock, TaskGraph, lower_bound_ns, roll_out, simulate


def search(step: TaskGraph, rollouts: int = 300, **given) -> Searched:
    method = given.pop("method", "shifts")
    found = search_orders(step, method=method, limits=OrderLimits(rollouts=rollouts, **given))
    assert isinstance(found, Searched)
    return found


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), method=st.sampled_from(sorted(METHODS)), room=st.sampled_from((None, 0.3, 0.6)))
def test_bound_is_at_most_the_best_and_the_best_at_most_the_natural_order(seed: int, method: str, room: float | None):
    step = random_step(seed, ranks=3, microbatches=4, segments=2, room=room)
    found = search(step, method=method)
    natural = roll_out(step)
    assert not isinstance(natural, Deadlock)
    assert lower_bound_ns(step) <= found.makespan_ns <= natural[1].makespan_ns
    assert simulate(step, found.orders) == found.timed
    assert all(peak <= limit for peak, limit in zip(found.timed.peak_bytes, step.limit_bytes, strict=False))


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_seed_gives_the_same_answer(method: str, threads: int):
    step = random_step(5, ranks=3, microbatches=4, room=0.5)
    first, second = (search(step, method=method, threads=threads, seed=7) for _ in range(2))
    assert (first.orders, first.timed, first.num_rollouts) == (second.orders, second.timed, second.num_rollouts)


def test_memory_too_small_for_one_microbatch_is_a_deadlock():
    step = random_step(5, ranks=2, microbatches=2)
    tight = TaskGraph(tasks=step.tasks, waits=step.waits, rank_of=step.rank_of, limit_bytes=(18, 18))
    found = search_orders(tight, limits=OrderLimits(rollouts=200))
    assert isinstance(found, Deadlock)
    assert max(found.short_bytes) > 0


def test_effort_is_counted_and_no_clock_decides():
    step = random_step(7, ranks=4, microbatches=6)
    found = [search_orders(step, limits=OrderLimits(effort=0.02, threads=threads), bound_ns=0) for threads in (1, 1, 2)]
    assert found[0].orders == found[1].orders
    assert found[0].num_rollouts == found[1].num_rollouts
    assert abs(found[0].effort - 0.02) < 0.01
    assert found[2].num_rollouts > 1.5 * found[0].num_rollouts
