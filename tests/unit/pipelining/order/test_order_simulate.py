"""Orders played, and rankings rolled out, against times and deadlocks worked out by hand."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from task_graph_cases import BACKWARD, FORWARD, StepBuilder, limited, random_step

from mosaic.graph import Part
from mosaic.pipelining.tasks import Admission, Deadlock, Task, TaskGraph, Timed, Wait, roll_out, simulate

PARTS = (Part(module="text"),)


def chain(microbatches: int, *, room: float | None = None, lag_ns: int = 0) -> TaskGraph:
    """Two ranks, forwards of 10 and backwards of 20."""
    build = StepBuilder(2, lag_ns=lag_ns)
    for microbatch in range(microbatches):
        ((_, last, back, _),) = build.module("text", microbatch, 1, 1, (10, 20), 16)
        build.wait(last, back)
    return limited(build, (0, 1), room)


def test_each_task_starts_when_its_row_is_free_and_what_it_waits_for_has_come():
    # Of each microbatch: forward on 0 and 1, backward on 1 and 0.
    timed = simulate(chain(2, lag_ns=3), ((0, 4, 3, 7), (1, 2, 5, 6)))
    assert isinstance(timed, Timed)
    assert timed.start_ns == (0, 13, 23, 46, 10, 43, 53, 76)
    assert timed.makespan_ns == 96
    assert timed.peak_bytes == (
        40,
        24,
    )  # two held on rank 0 and one on rank 1, of 16 bytes each, beside 8 of a backward


def test_orders_that_wait_for_each_other_are_a_deadlock_that_memory_has_no_part_in():
    found = simulate(chain(1), ((3, 0), (1, 2)))
    assert found == Deadlock(waiting=(3, 1), at_ns=0, short_bytes=(0, 0))


def test_orders_that_memory_stops_are_a_deadlock_that_says_by_how_much():
    step = chain(3, room=0.4)  # 35 bytes a rank: two held leave no room for a third
    found = simulate(step, ((0, 4, 8, 3, 7, 11), (1, 2, 5, 6, 9, 10)))
    assert isinstance(found, Deadlock)
    assert found.waiting[0] in (4, 8)
    assert found.short_bytes[0] > 0
    assert found.short_bytes[1] == 0


def interlocked() -> TaskGraph:
    """Two microbatches with two forwards each on one rank, which holds three of the four."""
    tasks = []
    for microbatch in range(2):
        for kind, takes, frees in ((FORWARD, 10, 0), (FORWARD, 10, 0), (BACKWARD, 0, 20)):
            tasks.append(
                Task(row=0, kind=kind, parts=PARTS, microbatch=microbatch, time_ns=5, takes_bytes=takes,
                     frees_bytes=frees, group=len(tasks))
            )  # fmt: skip
    waits = tuple(Wait(source=a, target=b) for a, b in ((0, 1), (1, 2), (3, 4), (4, 5)))
    return TaskGraph(tasks=tuple(tasks), waits=waits, rank_of=(0,), limit_bytes=(20,))


def test_the_papers_gate_runs_into_a_deadlock_where_a_reservation_does_not():
    step, ranking = interlocked(), (0, 3, 1, 4, 2, 5)
    found = roll_out(step, ranking, admission=Admission.GATE)
    assert found == Deadlock(waiting=(1,), at_ns=10, short_bytes=(10,))
    orders, timed = roll_out(step, ranking, admission=Admission.RESERVE)
    assert (orders, timed.peak_bytes) == (((0, 1, 2, 3, 4, 5),), (20,))


@given(seed=st.integers(0, 10**6), lanes=st.booleans(), apart=st.booleans(), gated=st.booleans())
def test_what_a_roll_out_gives_keeps_waits_rows_and_memory(seed: int, lanes: bool, apart: bool, gated: bool):
    step = random_step(seed, ranks=3, microbatches=4, lanes=lanes, apart=apart, lag_ns=1, room=0.4)
    found = roll_out(step, admission=Admission.GATE if gated else Admission.RESERVE)
    if isinstance(found, Deadlock):
        assert gated
        return
    orders, timed = found
    ends = [start + task.time_ns for start, task in zip(timed.start_ns, step.tasks, strict=True)]
    assert all(ends[wait.source] + wait.lag_ns <= timed.start_ns[wait.target] for wait in step.waits)
    for row, order in enumerate(orders):
        assert sorted(order) == [index for index, task in enumerate(step.tasks) if task.row == row]
        assert all(ends[a] <= timed.start_ns[b] for a, b in itertools.pairwise(order))
    assert all(peak <= limit for peak, limit in zip(timed.peak_bytes, step.limit_bytes, strict=True))
    if not lanes:  # a reservation may leave gaps that its orders do not need
        assert simulate(step, orders).makespan_ns <= timed.makespan_ns
