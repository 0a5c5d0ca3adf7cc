"""A whole step: tasks in their ranks' orders, sums of gradients over the data-parallel ranks, and memory over time.

A task is a subgraph that was simulated once: its time, and the bytes that it takes and frees. Orders of rows are edges
between tasks like any other, so that a step is a saved state of its tasks with these edges added. When the last task
that makes gradients of a rank has ended, the rank's sum over its data-parallel peers starts, on the links.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.semu.rank_hardware import Collective, RankHardware
from mosaic.pipelining.semu.saved_state import Dependency, SavedState, resume, simulate_nodes
from mosaic.pipelining.semu.timeline import MemoryTimeline, timeline_of
from mosaic.pipelining.tasks import Orders, TaskGraph
from mosaic.pipelining.workload.layers import PipelineModel


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedStep:
    """When tasks of a step run, and what ranks hold meanwhile."""

    start_ns: tuple[int, ...]
    """Of each task."""
    makespan_ns: int
    """When the last task ends."""
    end_ns: int
    """When the last sum of gradients ends too."""
    memory: tuple[MemoryTimeline, ...]
    """Of each rank."""


def saved_state_of(graph: TaskGraph) -> SavedState:
    """Returns all microbatches as if each row could run everything at once: what a schedule then adds its edges to."""
    dependencies = (Dependency(source=one.source, target=one.target, lag_ns=one.lag_ns) for one in graph.waits)
    return simulate_nodes([task.time_ns for task in graph.tasks], dependencies)


def emulate_step(
    graph: TaskGraph, orders: Orders, *, saved: SavedState | None = None, reduce_ns: Sequence[int] = ()
) -> EmulatedStep:
    """Returns a step with its memory timelines.

    Args:
        graph: Its tasks.
        orders: For each row the order of its tasks.
        saved: ``saved_state_of(graph)``, for those who simulate many orders.
        reduce_ns: For each rank how long the sum of its gradients takes, as ``gradient_sums_ns`` has it; empty: there
            is none.

    Raises:
        ValueError: A row's order lacks a task of it, has one twice or another row's, orders and waits make a circle (a
            deadlock), or ``reduce_ns`` has another number of ranks or a negative time.
    """
    if len(orders) != graph.num_rows:
        raise ValueError(f"orders of {len(orders)} rows; the graph has {graph.num_rows}")
    if reduce_ns and (len(reduce_ns) != graph.num_ranks or min(reduce_ns) < 0):
        raise ValueError(f"reduce_ns={tuple(reduce_ns)}; give a time of 0 or more for each of {graph.num_ranks} ranks")
    mine: list[set[int]] = [set() for _ in orders]
    for index, task in enumerate(graph.tasks):
        mine[task.row].add(index)
    edges: list[Dependency] = []
    for row, order in enumerate(orders):
        if len(order) != len(mine[row]) or set(order) != mine[row]:
            raise ValueError(f"row {row} orders {len(order)} tasks; it has {len(mine[row])}, each to run once")
        edges += (Dependency(source=one, target=two) for one, two in itertools.pairwise(order))
    done = resume((saved or saved_state_of(graph),), edges)
    return EmulatedStep(
        start_ns=done.start_ns,
        makespan_ns=done.makespan_ns,
        end_ns=_reduced(graph, done, reduce_ns),
        memory=rank_timelines(graph, done.start_ns),
    )


def rank_timelines(graph: TaskGraph, start_ns: Sequence[int]) -> tuple[MemoryTimeline, ...]:
    """Returns the memory of each rank over time: a task's bytes from its start on, less those freed at its end."""
    changes: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_ranks)]
    for task, start in zip(graph.tasks, start_ns, strict=True):
        own = changes[graph.rank_of[task.row]]
        if task.takes_bytes:
            own.append((start, task.takes_bytes))
        if task.frees_bytes:
            own.append((start + task.time_ns, -task.frees_bytes))
    bases = graph.base_bytes or (0,) * graph.num_ranks
    return tuple(timeline_of(one, base) for one, base in zip(changes, bases, strict=True))


def gradient_sums_ns(machine: RankHardware, model: PipelineModel, partition: Partition) -> tuple[int, ...]:
    """Returns for each rank how long its gradients' sum takes, as Megatron's distributed optimizer does it.

    Gradients in float32 are reduce-scattered over the data and context ranks, and weights in bfloat16 gathered.
    """
    modules = {module.name: module for module in model.modules}
    trained = [0] * partition.num_ranks
    for chunk in partition.chunks:
        for part in chunk.parts:
            module = modules[part.module]
            own = (at for at in range(part.first, part.end) if module.trains[at])
            trained[chunk.rank] += sum(module.num_parameters(at, 1) for at in own)
    found = []
    for count in trained:
        own_count = count // machine.degrees.tensor
        scattered = Collective(name="gradients", num_bytes=4 * own_count, axis="data")
        gathered = Collective(name="weights", num_bytes=2 * own_count, axis="data")
        found.append(machine.time_ns(scattered) + machine.time_ns(gathered))
    return tuple(found)


def _reduced(graph: TaskGraph, done: SavedState, reduce_ns: Sequence[int]) -> int:
    ends = [0] * graph.num_ranks
    for task, start in zip(graph.tasks, done.start_ns, strict=True):
        if task.kind is not ActionKind.FORWARD:
            rank = graph.rank_of[task.row]
            ends[rank] = max(ends[rank], start + task.time_ns)
    return max([done.makespan_ns, *(end + time for end, time in zip(ends, reduce_ns, strict=False))])
