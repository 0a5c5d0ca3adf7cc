"""What orders take, and what a ranking of groups gives.

A roll-out interleaves forwards and backwards as in PipeWeaver 6.2: a row that is free takes the first task by ranking
that could start by now, and where a forward and a backward both could, the kind that it did not run last. Memory
lets tasks in by one of two rules (``Admission``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from mosaic.pipelining.tasks import Deadlock, Orders, TaskGraph, Timed
from mosaic.search_extension import load_search

if TYPE_CHECKING:
    from mosaic import _search


class Admission(StrEnum):
    """How a rank's memory lets tasks in."""

    GATE = "gate"
    """A task that does not fit closes its queue for now, as in the paper; rows may come to wait for ever."""
    RESERVE = "reserve"
    """A microbatch comes in where all that it will hold fits on every rank; one that came in always ends."""


def simulate(graph: TaskGraph, orders: Orders) -> Timed | Deadlock:
    """Plays orders: each task starts as soon as its row is free, what it waits for has come, and memory has room.

    Where rows share a rank and memory has room for one of two that could start at one time, the lower row starts.

    Raises:
        ValueError: A row lacks one of its tasks, or has another one.
    """
    return _answer(load_search().replay(graph.compiled, orders))


def roll_out(
    graph: TaskGraph, ranking: Sequence[int] | None = None, *, admission: Admission = Admission.RESERVE
) -> tuple[Orders, Timed] | Deadlock:
    """Returns orders and times for a ranking of groups, the first one first; as they come where it is left out.

    Raises:
        ValueError: The ranking lacks a group, or has one twice.
    """
    groups = graph.compiled.natural_ranking if ranking is None else ranking
    orders, played = load_search().roll_out(graph.compiled, groups, is_gated=admission == Admission.GATE)
    answer = _answer(played)
    return answer if isinstance(answer, Deadlock) else (tuple(map(tuple, orders)), answer)


def deadlock_of(found: _search.Deadlock) -> Deadlock:
    """Returns what the extension says about rows that wait for ever."""
    return Deadlock(waiting=tuple(found.waiting), at_ns=found.at_ns, short_bytes=tuple(found.short_bytes))


def _answer(played: _search.Replayed) -> Timed | Deadlock:
    if played.deadlock is not None:
        return deadlock_of(played.deadlock)
    return Timed(start_ns=tuple(played.start_ns), makespan_ns=played.makespan_ns, peak_bytes=tuple(played.peak_bytes))
