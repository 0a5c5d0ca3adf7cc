"""Steps of tasks: times, memory over time, and sums of gradients."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.graph import Part
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.partition.partition import Chunk, Partition
from mosaic.pipelining.semu.rank_hardware import Collective, RankHardware
from mosaic.pipelining.semu.step import emulate_step, gradient_sums_ns, saved_state_of
from mosaic.pipelining.tasks import Orders, Task, TaskGraph, Wait
from mosaic.pipelining.workload.known_models import find_known_model

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def two_ranks(num_microbatches: int = 2, *, lag_ns: int = 1) -> TaskGraph:
    """Forward of 2 and backward of 4 ns on each of two ranks; each forward takes 10 bytes and 3 of workspace."""
    tasks, waits = [], []
    for microbatch in range(num_microbatches):
        first = len(tasks)
        tasks += [
            Task(row=row, kind=F, parts=(), microbatch=microbatch, time_ns=2, takes_bytes=13, frees_bytes=3)
            for row in (0, 1)
        ]
        tasks += [Task(row=row, kind=B, parts=(), microbatch=microbatch, time_ns=4, frees_bytes=10) for row in (1, 0)]
        waits += [Wait(source=first + at, target=first + at + 1, lag_ns=0 if at == 1 else lag_ns) for at in range(3)]
    return TaskGraph(tasks=tuple(tasks), waits=tuple(waits), rank_of=(0, 1), base_bytes=(100, 50))


ONE_F_ONE_B: Orders = ((0, 4, 3, 7), (1, 2, 5, 6))


def test_a_step_has_the_times_worked_out_by_hand() -> None:
    step = emulate_step(two_ranks(), ONE_F_ONE_B)
    assert step.start_ns == (0, 3, 5, 10, 2, 9, 11, 16)
    assert (step.makespan_ns, step.end_ns) == (20, 20)
    assert [timeline.peak_bytes for timeline in step.memory] == [123, 63]
    assert [step.memory[0].bytes_at(at) for at in (0, 2, 4, 14, 20)] == [113, 123, 120, 110, 100]


def test_a_saved_state_gives_the_same_step_as_none() -> None:
    graph = two_ranks()
    assert emulate_step(graph, ONE_F_ONE_B, saved=saved_state_of(graph)) == emulate_step(graph, ONE_F_ONE_B)


def test_sums_of_gradients_start_when_a_rank_has_no_backward_left() -> None:
    assert emulate_step(two_ranks(), ONE_F_ONE_B, reduce_ns=(1, 9)).end_ns == 24
    assert emulate_step(two_ranks(), ONE_F_ONE_B, reduce_ns=(5, 0)).end_ns == 25


def test_gradients_of_what_trains_are_scattered_and_weights_gathered() -> None:
    known = find_known_model("cornstarch-vlm-s-llm-s")
    model = known.model()
    machine = RankHardware(cluster=known.cluster(), degrees=known.degrees)
    vision, text = (
        Chunk(parts=(Part(module=module.name, count=len(module.trains), total=len(module.trains)),), rank=rank)
        for rank, module in enumerate(model.modules)
    )
    found = gradient_sums_ns(machine, model, Partition(num_ranks=2, chunks=(vision, text)))
    projector = 1408 * 2048 // 2
    scatter = Collective(name="g", num_bytes=4 * projector, axis="data")
    gather = Collective(name="w", num_bytes=2 * projector, axis="data")
    assert found == (machine.collective_ns(scatter) + machine.collective_ns(gather), 0)
    assert found[0] > 0


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(0, 4))
def test_memory_is_the_direct_sum_over_tasks_at_each_time(count: int, lag_ns: int) -> None:
    graph = two_ranks(count, lag_ns=lag_ns)
    forwards = [[4 * at + row for at in range(count)] for row in (0, 1)]
    backwards = [[4 * at + (3, 2)[row] for at in range(count)] for row in (0, 1)]
    step = emulate_step(graph, tuple(tuple(one + two) for one, two in zip(forwards, backwards, strict=True)))
    for rank, timeline in enumerate(step.memory):
        for at in range(step.makespan_ns + 1):
            direct = graph.base_bytes[rank] + sum(
                task.takes_bytes * (start <= at) - task.frees_bytes * (start + task.time_ns <= at)
                for task, start in zip(graph.tasks, step.start_ns, strict=True)
                if task.row == rank
            )
            assert timeline.bytes_at(at) == direct


def test_orders_that_cannot_run_or_lack_a_task_are_refused() -> None:
    with pytest.raises(ValueError, match="in a circle"):
        emulate_step(two_ranks(), ((3, 0, 4, 7), (1, 2, 5, 6)))
    with pytest.raises(ValueError, match="row 1 orders 3 tasks; it has 4"):
        emulate_step(two_ranks(), ((0, 4, 3, 7), (1, 2, 5)))
    with pytest.raises(ValueError, match="each to run once"):
        emulate_step(two_ranks(), ((0, 4, 3, 3), (1, 2, 5, 6)))
    with pytest.raises(ValueError, match="orders of 1 rows"):
        emulate_step(two_ranks(), ((0,),))


@pytest.mark.parametrize("reduce_ns", [(1,), (1, -1)])
def test_sums_need_a_time_for_each_rank(reduce_ns: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a time of 0 or more for each of 2 ranks"):
        emulate_step(two_ranks(), ONE_F_ONE_B, reduce_ns=reduce_ns)
