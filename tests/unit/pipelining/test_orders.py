"""Orders: simulated, rolled out from rankings, and searched; their lower bound."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from executor_cases import model
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.pipeline_proof import prove
from pipeline_cases import cut_in_pieces, images

from mosaic.hardware import Link
from mosaic.pipelining.orders import METHODS, OrderLimits, Searched, search_orders
from mosaic.pipelining.partition import Request
from mosaic.pipelining.task_graph import RankSpace, task_graph
from mosaic.pipelining.tasks import ActionKind, Deadlock, TaskGraph, lower_bound_ns, roll_out, simulate


def random_step(
    seed: int,
    *,
    ranks: int = 2,
    microbatches: int = 2,
    method: str = "separated",
    link: Link | None = None,
    apart: bool = False,
    room: float | None = None,
) -> TaskGraph:
    """A step of a random model, its encoders in pieces of one image.

    ``room``: each rank's memory, as a share of what all microbatches keep there, and enough for any one of them.
    """
    chance = random.Random(seed)
    while True:
        drawn, step = model(chance), images(*(chance.randint(0, 2) for _ in range(microbatches)))
        request = Request(model=drawn, num_ranks=ranks, microbatches=step, slots_per_rank=4)
        try:
            partition = cut_in_pieces(method, request, {module.name: 1 for module in drawn.modules[:-1]})
            break
        except ValueError:  # too few layers, or no encoder
            continue
    graph = task_graph(drawn, partition, step, RankSpace(network=link), weights_apart=apart)
    if room is None:
        return graph
    kept = [[0] * microbatches for _ in range(ranks)]
    for task in graph.tasks:
        kept[graph.rank_of[task.row]][task.microbatch] += max(0, task.takes_bytes - task.frees_bytes)
    most = max(task.frees_bytes for task in graph.tasks if task.kind is ActionKind.FORWARD)
    workspace = most * graph.num_rows // ranks  # each lane's
    limits = (
        base + max(*own, int(room * sum(own))) + workspace for base, own in zip(graph.base_bytes, kept, strict=True)
    )
    return replace(graph, limit_bytes=tuple(limits))


def search(step: TaskGraph, rollouts: int = 300, **given) -> Searched:
    method = given.pop("method", "shifts")
    found = search_orders(step, method=method, limits=OrderLimits(rollouts=rollouts, **given))
    assert isinstance(found, Searched)
    return found


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), method=st.sampled_from(sorted(METHODS)), room=st.sampled_from((None, 0.3, 0.6)))
def test_bound_is_at_most_the_best_and_the_best_at_most_the_natural_order(seed: int, method: str, room: float | None):
    step = random_step(seed, ranks=2, microbatches=4, method="mixed-v", room=room)
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


LINK = Link(gb_per_s=0.001)
SHAPES: tuple[dict, ...] = (
    {"microbatches": 3, "link": LINK},
    {"ranks": 3},
    {"method": "mixed-v"},
    {"method": "colocated"},
    {"apart": True},
)


@pytest.mark.parametrize("room", [None, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_search_finds_the_optimum_of_small_steps_and_no_bound_is_above_it(shape: dict, room: float | None):
    for seed in range(2):
        step = random_step(seed, **shape, room=room)
        assert len(step.tasks) <= 60
        first = search_orders(step, limits=OrderLimits(rollouts=10_000))
        assert isinstance(first, Searched)
        proven = prove(step, hint=first.timed.start_ns, seconds=30, effort=0.5)
        assert lower_bound_ns(step) <= proven.bound_ns
        if not proven.is_optimal:
            continue
        found = search_orders(step, limits=OrderLimits(rollouts=2_000_000), bound_ns=proven.makespan_ns)
        assert isinstance(found, Searched)
        assert found.makespan_ns == proven.makespan_ns


@given(seed=st.integers(0, 10**6), lanes=st.booleans(), apart=st.booleans())
def test_what_a_roll_out_gives_keeps_waits_rows_and_memory(seed: int, lanes: bool, apart: bool):
    method = "colocated" if lanes else "separated"
    step = random_step(seed, ranks=2, microbatches=4, method=method, apart=apart, link=LINK, room=0.4)
    orders, timed = roll_out(step)
    ends = [start + task.time_ns for start, task in zip(timed.start_ns, step.tasks, strict=True)]
    assert all(ends[wait.source] + wait.lag_ns <= timed.start_ns[wait.target] for wait in step.waits)
    for row, order in enumerate(orders):
        assert sorted(order) == [index for index, task in enumerate(step.tasks) if task.row == row]
        assert all(ends[a] <= timed.start_ns[b] for a, b in itertools.pairwise(order))
    assert all(peak <= limit for peak, limit in zip(timed.peak_bytes, step.limit_bytes, strict=True))
    if not lanes:  # a reservation may leave gaps that its orders do not need
        assert simulate(step, orders).makespan_ns <= timed.makespan_ns
