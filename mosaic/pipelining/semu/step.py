"""Memory of ranks over a step, and time of their gradient sums over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.semu.rank_hardware import Collective, RankHardware
from mosaic.pipelining.semu.timeline import MemoryTimeline, timeline_of
from mosaic.pipelining.tasks import TaskGraph
from mosaic.pipelining.workload.layers import PipelineModel


def rank_timelines(graph: TaskGraph, start_ns: Sequence[int]) -> tuple[MemoryTimeline, ...]:
    """Returns the memory of each rank over time, from the bytes that tasks take and free."""
    changes: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_ranks)]
    for task, start in zip(graph.tasks, start_ns, strict=True):
        own = changes[graph.rank_of[task.row]]
        if task.takes_bytes:
            own.append((start, task.takes_bytes))
        if task.frees_bytes:
            own.append((start + task.time_ns, -task.frees_bytes))
    bases = graph.base_bytes or (0,) * graph.num_ranks
    return tuple(timeline_of(own, base) for own, base in zip(changes, bases, strict=True))


def gradient_sums_ns(machine: RankHardware, model: PipelineModel, partition: Partition) -> tuple[int, ...]:
    """Returns the time of each rank's gradient sum, as in Megatron's distributed optimizer.

    Gradients in float32 are reduce-scattered over the data and context ranks, and weights in bfloat16 gathered.
    """
    modules = {module.name: module for module in model.modules}
    trained = [0] * partition.num_ranks
    for chunk in partition.chunks:
        for part in chunk.parts:
            module = modules[part.module]
            own = (at for at in range(part.first, part.end) if module.trains[at])
            trained[chunk.rank] += sum(module.num_parameters(at, 1) for at in own)
    times_ns = []
    for count in trained:
        own_count = count // machine.degrees.tensor
        scattered = Collective(name="gradients", num_bytes=4 * own_count, axis="data")
        gathered = Collective(name="weights", num_bytes=2 * own_count, axis="data")
        times_ns.append(machine.time_ns(scattered) + machine.time_ns(gathered))
    return tuple(times_ns)
