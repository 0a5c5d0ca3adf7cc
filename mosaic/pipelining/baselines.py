"""Schedules of other systems, to compare ours with: GPipe, 1F1B, interleaved 1F1B and ZB-V.

A baseline cuts a model and orders its tasks. Orders are written in torch's form: ``0F1`` is chunk 0's forward of
microbatch 1, and stands for all of its pieces in turn. Chunk c is on rank c mod P, or in a V, down all ranks and back
up. To add a baseline, write a function from (ranks, microbatches, chunks of each rank) to each rank's tasks in order,
wrap it in ``chain_of``, and name it in ``BASELINES``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.partition import Partition, Request
from mosaic.pipelining.schedule import TaskName
from mosaic.pipelining.tasks import ActionKind, Orders, TaskGraph

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHTS


def orders_of(graph: TaskGraph, rows: Sequence[Iterable[TaskName]]) -> Orders:
    """Returns the orders of a graph's tasks by slots.

    Slots without a task are empty: skipped chunks, missing backwards, and weights' backwards that are not apart.

    Raises:
        ValueError: A task has no slot, or a slot is of another row.
    """
    tasks_of_slot: dict[TaskName, list[int]] = defaultdict(list)
    for index, task in enumerate(graph.tasks):
        tasks_of_slot[TaskName(task.chunk, task.kind, task.microbatch)].append(index)
    for slot, tasks in tasks_of_slot.items():
        if slot.kind is ActionKind.FORWARD:
            tasks.sort(key=lambda index: graph.tasks[index].piece)
    orders = []
    for row, slots in enumerate(rows):
        order = [index for slot in slots for index in tasks_of_slot.pop(slot, ())]
        misplaced = next((index for index in order if graph.tasks[index].row != row), None)
        if misplaced is not None:
            raise ValueError(f"task {misplaced} is of row {graph.tasks[misplaced].row}, and its slot of row {row}")
        orders.append(tuple(order))
    if tasks_of_slot:
        raise ValueError(f"no slot for {next(iter(tasks_of_slot))}; the order is for other chunks or microbatches")
    return tuple(orders)


def gpipe(num_ranks: int, num_microbatches: int, chunks_per_rank: int = 1) -> list[list[TaskName]]:
    """Every forward, then every backward (https://arxiv.org/abs/1811.06965), chunk after chunk."""
    rows = []
    for rank in range(num_ranks):
        own = range(rank, num_ranks * chunks_per_rank, num_ranks)
        forward = [TaskName(chunk, F, at) for chunk in own for at in range(num_microbatches)]
        rows.append(forward + [TaskName(slot.chunk, B, slot.microbatch) for slot in reversed(forward)])
    return rows


def one_f_one_b_slots(depths: Sequence[int], num_microbatches: int) -> list[list[TaskName]]:
    """1F1B (PipeDream-Flush) of one chunk a rank, whose warm-up is ``depths``, the chunks after each.

    With depths 2, 1, 0 and four microbatches::

        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    return [
        in_turn(
            [TaskName(chunk, F, at) for at in range(num_microbatches)],
            [TaskName(chunk, B, at) for at in range(num_microbatches)],
            min(depth, num_microbatches),
        )
        for chunk, depth in enumerate(depths)
    ]


def interleaved(num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> list[list[TaskName]]:
    """Several chunks a rank, P microbatches through each in turn (https://arxiv.org/abs/2104.04473, section 2.2).

    With one chunk a rank this is 1F1B.

    Raises:
        ValueError: With several chunks a rank, microbatches are not a multiple of the ranks (Megatron's rule).
    """
    if chunks_per_rank > 1 and num_microbatches % num_ranks:
        raise ValueError(
            f"{num_microbatches} microbatches on {num_ranks} ranks with {chunks_per_rank} chunks each; interleaving "
            f"takes P microbatches at a time: use a multiple of {num_ranks}, or one chunk a rank"
        )
    rows = []
    hop = 1 if chunks_per_rank == 1 else 2
    group = num_ranks if chunks_per_rank > 1 else num_microbatches
    for rank in range(num_ranks):
        own = range(rank, num_ranks * chunks_per_rank, num_ranks)
        forward = by_groups(own, F, num_microbatches, group)
        backward = by_groups(own[::-1], B, num_microbatches, group)
        warm_up = min((chunks_per_rank - 1) * group + hop * (num_ranks - 1 - rank), len(forward))
        rows.append(in_turn(forward, backward, warm_up))
    return rows


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> list[list[TaskName]]:
    """Two chunks a rank in a V, backward for weights apart (https://arxiv.org/abs/2401.10241, section 6)."""
    count = max(2 * num_ranks - 1, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        row: list[TaskName] = []
        following = Counter[tuple[ActionKind, int]]()
        down, up = rank, 2 * num_ranks - 1 - rank

        def repeat(times: int, phases: str) -> None:
            """Writes phases such as ``F0 B1``: 0 is the chunk on the way down, 1 that on the way up."""
            for phase in phases.split() * times:
                key = ActionKind(phase[0]), up if phase[1] == "1" else down  # noqa: B023  # called in this round alone
                row.append(TaskName(key[1], key[0], following[key]))  # noqa: B023
                following[key] += 1  # noqa: B023

        repeat(2 * (num_ranks - rank) - 1, "F0")
        repeat(rank, "F1 F0")
        repeat(num_ranks - rank, "F1 B1 W1")
        repeat(count - following[F, down], "F0 B0 W0 F1 B1 W1")
        repeat(count - following[F, up], "B0 W0 F1 B1 W1")
        repeat(rank, "B0 B1")
        repeat(num_ranks - rank, "B0 W0")
        repeat(following[B, up] - following[W, up], "W1")
        repeat(following[B, down] - following[W, down], "W0")
        rows.append([slot for slot in row if slot.microbatch < num_microbatches])
    return rows


def by_groups(chunks: Sequence[int], kind: ActionKind, num_microbatches: int, group: int) -> list[TaskName]:
    """Returns a phase of a group of microbatches through each chunk in turn, then of the next group."""
    return [
        TaskName(chunk, kind, at)
        for start in range(0, num_microbatches, group)
        for chunk in chunks
        for at in range(start, min(start + group, num_microbatches))
    ]


def in_turn(forward: Sequence[TaskName], backward: Sequence[TaskName], warm_up: int) -> list[TaskName]:
    """Returns ``warm_up`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    row = list(forward[:warm_up])
    for pair in zip(forward[warm_up:], backward, strict=False):
        row += pair
    return row + list(backward[len(forward) - warm_up :])


def num_microbatches_of(graph: TaskGraph) -> int:
    return 1 + max(task.microbatch for task in graph.tasks)


def chunk_depths(graph: TaskGraph, partition: Partition) -> tuple[int, ...]:
    """Returns the number of chunks after each on its longest path to the end."""
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
    """1F1B of one chunk a row: its warm-up is the number of chunks after it (Cornstarch, Figure 6).

    Raises:
        ValueError: A row has several chunks.
    """
    of_row = {chunk.row: index for index, chunk in enumerate(partition.chunks)}
    if len(of_row) < len(partition.chunks):
        raise ValueError(
            f"{len(partition.chunks)} chunks on {len(of_row)} rows; 1F1B has one on each: use chunks_per_rank=1, or an "
            "interleaved schedule"
        )
    slots = one_f_one_b_slots(chunk_depths(graph, partition), num_microbatches_of(graph))
    rows = [slots[of_row[row]] if row in of_row else [] for row in partition.rows]
    return (orders_of(graph, rows),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A way to cut a model and to order its tasks."""

    name: str
    description: str
    cut: Callable[[Request], Partition]
    """Makes the partition for the request's representative microbatches."""
    order: Callable[[TaskGraph, Partition], tuple[Orders, ...]]
    """Orders the tasks of a step; the fastest of several orders counts."""
    weights_apart: bool = False
    """True if backward for weights is a task of its own."""


def cut_by(name: str, chunks_per_rank: int) -> Callable[[Request], Partition]:
    """Returns a cut by a method of ``PARTITION_METHODS`` with this number of chunks in place of the request's."""
    return lambda request: partition_by(name, replace(request, chunks_per_rank=chunks_per_rank))


def chain_of(
    slots: Callable[[int, int, int], Sequence[Sequence[TaskName]]],
) -> Callable[[TaskGraph, Partition], tuple[Orders, ...]]:
    """Returns an order by slots of ranks, microbatches and chunks per rank, for chunks that cycle over all ranks."""

    def order(graph: TaskGraph, partition: Partition) -> tuple[Orders, ...]:
        count = num_microbatches_of(graph)
        rows = slots(partition.num_ranks, count, len(partition.chunks) // partition.num_ranks)
        return (orders_of(graph, rows),)

    return order


BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        baseline.name: baseline
        for baseline in (
            Baseline(
                name="gpipe",
                description="every forward before every backward",
                cut=cut_by("mixed-parameters", 1),
                order=chain_of(gpipe),
            ),
            Baseline(
                name="1f1b",
                description="one forward, one backward, one chunk a rank balanced by parameters",
                cut=cut_by("mixed-parameters", 1),
                order=one_f_one_b,
            ),
            Baseline(
                name="megatron",
                description="interleaved 1F1B, two chunks a rank or more balanced by parameters",
                cut=lambda request: partition_by(
                    "mixed-parameters", replace(request, chunks_per_rank=max(2, request.chunks_per_rank))
                ),
                order=chain_of(interleaved),
            ),
            Baseline(
                name="zb-v",
                description="two chunks a rank in a V, backward for weights in bubbles",
                cut=lambda request: partition_by("mixed-v", request),
                order=chain_of(lambda num_ranks, count, _: zero_bubble_v(num_ranks, count)),
                weights_apart=True,
            ),
        )
    }
)
