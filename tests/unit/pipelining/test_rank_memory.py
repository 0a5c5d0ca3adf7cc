"""Memory of ranks over a step, and sums of gradients."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.pipeline_models import find_known_model
from mosaic.graph import Part
from mosaic.pipelining.partition import Chunk, Partition
from mosaic.pipelining.rank_hardware import Collective, RankHardware
from mosaic.pipelining.task_graph import gradient_sums_ns
from mosaic.pipelining.tasks import ActionKind, Task, TaskGraph, Timed, Wait, memory_peaks, simulate

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def two_ranks(num_microbatches: int, *, lag_ns: int) -> TaskGraph:
    """Forward of 2 and backward of 4 ns on each of two ranks; each forward takes 10 bytes and 3 of workspace."""
    tasks, waits = [], []
    for microbatch in range(num_microbatches):
        first, of = len(tasks), {"parts": (Part(module="text"),), "microbatch": microbatch}
        tasks += [Task(row=row, kind=F, time_ns=2, takes_bytes=13, frees_bytes=3, **of) for row in (0, 1)]
        tasks += [Task(row=row, kind=B, time_ns=4, frees_bytes=10, **of) for row in (1, 0)]
        waits += [Wait(source=first + at, target=first + at + 1, lag_ns=0 if at == 1 else lag_ns) for at in range(3)]
    return TaskGraph(tasks=tuple(tasks), waits=tuple(waits), rank_of=(0, 1), base_bytes=(100, 50))


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
    timed = simulate(graph, tuple(tuple(one + two) for one, two in zip(forwards, backwards, strict=True)))
    assert isinstance(timed, Timed)
    for rank, (peak, peak_ns) in enumerate(memory_peaks(graph, timed.start_ns)):
        direct = [
            graph.base_bytes[rank]
            + sum(
                task.takes_bytes * (start <= at) - task.frees_bytes * (start + task.time_ns <= at)
                for task, start in zip(graph.tasks, timed.start_ns, strict=True)
                if task.row == rank
            )
            for at in range(timed.makespan_ns + 1)
        ]
        assert peak == max(direct) == timed.peak_bytes[rank]
        assert peak_ns == direct.index(peak)
