"""Orders for several modules: 1F1B over any graph of chunks, encoders first, microbatches in clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, permutations

from mosaic.pipelining.baselines import classic
from mosaic.pipelining.baselines.slots import B, F, Slot, orders_of
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.tasks import Orders, TaskGraph

MAX_CLUSTERS = 4
"""Of microbatches, whose every order is tried: 24 of them."""


def num_microbatches_of(graph: TaskGraph) -> int:
    """Returns how many microbatches a graph's tasks have."""
    return 1 + max(task.microbatch for task in graph.tasks)


def chunk_depths(graph: TaskGraph, partition: Partition) -> tuple[int, ...]:
    """Returns for each chunk the chunks after it on the longest way to the end."""
    after: list[set[int]] = [set() for _ in partition.chunks]
    for wait in graph.waits:
        source, target = graph.tasks[wait.source], graph.tasks[wait.target]
        if source.kind is F and target.kind is F:
            after[source.chunk].add(target.chunk)
    depths = [0] * len(after)
    for chunk in reversed(range(len(after))):  # data pass through chunks in their order
        depths[chunk] = max((depths[target] + 1 for target in after[chunk]), default=0)
    return tuple(depths)


def one_f_one_b(graph: TaskGraph, partition: Partition) -> tuple[Orders, ...]:
    """1F1B where each row has one chunk: as many forwards first as there are chunks after it (Cornstarch, Figure 6).

    Raises:
        ValueError: A row has several chunks.
    """
    return (_one_f_one_b(graph, partition, range(num_microbatches_of(graph))),)


def in_any_cluster_order(graph: TaskGraph, partition: Partition) -> tuple[Orders, ...]:
    """1F1B with microbatches in clusters of like times, in every order of the clusters (DynaPipe's reordering).

    DynaPipe (https://arxiv.org/abs/2311.10418) orders clusters in the same way, but runs a schedule of its own, which
    adapts to memory, where this is 1F1B.
    """
    times = Counter[int]()
    for task in graph.tasks:
        times[task.microbatch] += task.time_ns
    ranked = sorted(times, key=lambda one: (times[one], one))
    count = min(MAX_CLUSTERS, len(ranked))
    bounds = [len(ranked) * at // count for at in range(count + 1)]
    clusters = [ranked[bounds[at] : bounds[at + 1]] for at in range(count)]
    orders = [list(chain(*order)) for order in permutations(clusters)]
    return tuple(_one_f_one_b(graph, partition, order) for order in (range(len(ranked)), *orders))


def encoders_before(graph: TaskGraph, partition: Partition) -> tuple[Orders, ...]:
    """Every forward of every encoder, the backbone by 1F1B, every backward of every encoder (Optimus, coarse-grained).

    The backbone is the last module; it is interleaved where it has several segments.

    Raises:
        ValueError: A module of several does not feed the last, or the microbatches do not divide.
    """
    *encoders, backbone = partition.modules
    num_ranks, count = partition.num_ranks, num_microbatches_of(graph)
    chunks = {
        name: [index for index, chunk in enumerate(partition.chunks) if chunk.parts[0].module == name]
        for name in partition.modules
    }
    middle = classic.interleaved(num_ranks, count, len(chunks[backbone]) // num_ranks)
    rows = []
    for rank in range(num_ranks):
        own = {name: [index for index in chunks[name] if partition.chunks[index].rank == rank] for name in encoders}
        forward = [slot for name in encoders for slot in classic.by_groups(own[name], F, count, num_ranks)]
        backward = [
            slot for name in reversed(encoders) for slot in classic.by_groups(own[name][::-1], B, count, num_ranks)
        ]
        between = [Slot(chunks[backbone][slot.chunk], slot.kind, slot.microbatch) for slot in middle[rank]]
        rows.append([*forward, *between, *backward])
    return (orders_of(graph, rows),)


def _one_f_one_b(graph: TaskGraph, partition: Partition, microbatches: Sequence[int]) -> Orders:
    of_row = {chunk.row: index for index, chunk in enumerate(partition.chunks)}
    if len(of_row) < len(partition.chunks):
        raise ValueError(
            f"{len(partition.chunks)} chunks on {len(of_row)} rows; 1F1B has one on each: use chunks_per_rank=1, or an "
            "interleaved schedule"
        )
    slots = classic.one_f_one_b(chunk_depths(graph, partition), len(microbatches))
    rows = [slots[of_row[row]] if row in of_row else [] for row in partition.rows]
    return orders_of(graph, rows, microbatches)
