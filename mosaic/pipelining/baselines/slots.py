"""Orders as slots, phases of chunks with microbatches, and how slots become orders of a graph's tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.tasks import Orders, TaskGraph

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHTS


@dataclass(frozen=True, slots=True)
class Slot:
    """One phase of a chunk with a whole microbatch: all of its pieces in turn."""

    chunk: int
    """Index in the partition."""
    kind: ActionKind
    """Forward, backward or backward for weights."""
    microbatch: int
    """Its place in the order of microbatches."""

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.value}{self.microbatch}"


Rows = Sequence[Iterable[Slot]]
"""For each row of a graph its slots, in order."""


def orders_of(graph: TaskGraph, rows: Rows, microbatches: Sequence[int] | None = None) -> Orders:
    """Returns the orders of a graph's tasks that slots say; ``microbatches`` says which one is the n-th.

    Slots of what a microbatch skips, or has no backward for, are empty. Where a graph has backward for weights in one
    task with that for inputs, slots for it are empty too.

    Raises:
        ValueError: A task has no slot, or a slot is of another row.
    """
    found: dict[Slot, list[int]] = defaultdict(list)
    place = {name: at for at, name in enumerate(microbatches)} if microbatches is not None else None
    for index, task in enumerate(graph.tasks):
        at = task.microbatch if place is None else place[task.microbatch]
        found[Slot(task.chunk, task.kind, at)].append(index)
    for slot, tasks in found.items():
        if slot.kind is ActionKind.FORWARD:
            tasks.sort(key=lambda index: graph.tasks[index].piece)
    orders = []
    for row, slots in enumerate(rows):
        order = [index for slot in slots for index in found.pop(slot, ())]
        strange = next((index for index in order if graph.tasks[index].row != row), None)
        if strange is not None:
            raise ValueError(f"task {strange} is of row {graph.tasks[strange].row}, and its slot of row {row}")
        orders.append(tuple(order))
    if found:
        raise ValueError(f"no slot for {next(iter(found))}; the order is for other chunks or microbatches")
    return tuple(orders)
