"""Bounds and proofs on small steps: bound <= optimum = what the search finds."""

from __future__ import annotations

import pytest
from oracles.pipeline_proof import prove
from task_graph_cases import BACKWARD, FORWARD, random_step

from mosaic.errors import InfeasibleError
from mosaic.graph import Part
from mosaic.pipelining.orders import OrderLimits, Searched, search_orders
from mosaic.pipelining.tasks import Task, TaskGraph, Wait, lower_bound_ns

PARTS = (Part(module="text"),)
SHAPES = (
    {"ranks": 2, "microbatches": 2, "segments": 2},
    {"ranks": 2, "microbatches": 3, "lag_ns": 2},
    {"ranks": 3, "microbatches": 2, "max_pieces": 2},
    {"ranks": 4, "microbatches": 2, "max_pieces": 1},
    {"ranks": 2, "microbatches": 2, "apart": True},
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


def pairs(limit: int, sizes: tuple[int, ...]) -> TaskGraph:
    """On one rank a forward and a backward for each size, 10 after the other since another rank has both between."""
    tasks, waits = [], []
    for microbatch, size in enumerate(sizes):
        at = len(tasks)
        for row, kind, takes, frees in ((0, FORWARD, size, 0), (1, FORWARD, 0, 0), (0, BACKWARD, 0, size)):
            time = 5 if row == 1 else 1
            tasks.append(
                Task(row=row, kind=kind, parts=PARTS, microbatch=microbatch, time_ns=time, takes_bytes=takes,
                     frees_bytes=frees, group=microbatch)
            )  # fmt: skip
        waits += [Wait(source=at, target=at + 1, lag_ns=10), Wait(source=at + 1, target=at + 2, lag_ns=10)]
    return TaskGraph(tasks=tuple(tasks), waits=tuple(waits), rank_of=(0, 1), limit_bytes=(limit, 0))


def test_memory_that_no_schedule_fits_is_proven_to_be_too_small():
    with pytest.raises(InfeasibleError, match="rank 0 has 9 bytes; raise its limit"):
        prove(pairs(9, (10,)))
