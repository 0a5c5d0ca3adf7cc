"""A model of ranks that run rows of a schedule, and a walk through all of its interleavings.

A row is a list of actions; what may differ from run to run is which row goes on next. To await either end of a message
needs both ends posted; a task comes after what it takes of other lanes of its rank. Channels are first-in first-out:
the order of messages is looked at by itself. Nothing here is shared with what lowers, checks or executes schedules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

Rows = Sequence[Sequence[str]]
Places = tuple[int, ...]
"""For each row how many actions it has done."""


def walk_all(rows: Rows, after: Mapping[str, Collection[str]] = MappingProxyType({})) -> tuple[int, tuple[str, ...]]:
    """Tries every interleaving; returns the states met, and where rows stand that wait for ever, if there are any.

    Args:
        rows: Actions.
        after: For a task those that it comes after, beside what its row says.
    """
    posted = {cell: (row, place) for row, cells in enumerate(rows) for place, cell in enumerate(cells)}
    needs: list[list[tuple[tuple[int, int], ...]]] = []
    for cells in rows:
        needs.append([])
        for cell in cells:
            verb, _, message = cell.partition("(")
            waits = verb in ("SENT", "GOT")
            ends = (f"SEND({message}", f"RECV({message}") if waits else tuple(after.get(cell, ()))
            needs[-1].append(tuple(posted[each] for each in ends))
    start = (0,) * len(rows)
    seen, todo = {start}, [start]
    while todo:
        at = todo.pop()
        nexts = [
            (*at[:row], place + 1, *at[row + 1 :])
            for row, place in enumerate(at)
            if place < len(rows[row]) and all(at[other] > there for other, there in needs[row][place])
        ]
        if not nexts:
            stuck = tuple(cells[place] for cells, place in zip(rows, at, strict=True) if place < len(cells))
            if stuck:
                return len(seen), stuck
        todo += [each for each in nexts if each not in seen]
        seen.update(nexts)
    return len(seen), ()


def mixed_up(rows: Rows, *, by_pairs: bool) -> tuple[str, str] | None:
    """Returns two messages of which one end would be taken for the other's, if there are any.

    Args:
        rows: Actions.
        by_pairs: Whether sends and receives of two rows in one direction are one queue at each end, as in NCCL's
            communicator of a pair; else each sense is one by itself.
    """
    home = {cell: row for row, cells in enumerate(rows) for cell in cells}
    queues: defaultdict[object, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row, cells in enumerate(rows):
        for cell in cells:
            verb, _, message = cell.rstrip(")").partition("(")
            if verb in ("SEND", "RECV"):
                source, target = message.split(">")
                ends = home[source], home[target]
                queues[frozenset(ends) if by_pairs else ends, "F" in source][row].append(message)
    for queue in queues.values():
        for pair in zip(*queue.values(), strict=True):
            if pair[0] != pair[1]:
                return pair
    return None
