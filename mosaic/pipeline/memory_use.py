"""Memory of each rank over a step that was simulated."""

from __future__ import annotations

from collections.abc import Sequence

from mosaic.pipeline.tasks import TaskGraph

MemoryUse = tuple[tuple[int, int], ...]
"""For one rank: from each of these nanoseconds on so many bytes are in use; the first is 0."""


def memory_use(graph: TaskGraph, start_ns: Sequence[int]) -> tuple[MemoryUse, ...]:
    """Returns for each rank what is in use when.

    What a task frees at the instant at which another one starts is free for it.
    """
    changes: list[dict[int, int]] = [{} for _ in range(graph.num_ranks)]
    for task, start in zip(graph.tasks, start_ns, strict=True):
        own = changes[graph.rank_of[task.row]]
        own[start] = own.get(start, 0) + task.takes_bytes
        own[start + task.time_ns] = own.get(start + task.time_ns, 0) - task.frees_bytes
    found = []
    for rank, own in enumerate(changes):
        used = graph.base_bytes[rank] if graph.base_bytes else 0
        line = [(0, used)]
        for at in sorted(own):
            used += own[at]
            line.append((at, used))
        found.append(tuple(line))
    return tuple(found)
