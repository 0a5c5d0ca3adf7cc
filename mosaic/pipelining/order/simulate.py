"""Simulation of orders, and roll-out of a ranking of groups.

A roll-out interleaves forwards and backwards as in PipeWeaver 6.2: a free row runs the first task by ranking that could
start by now, and if a forward and a backward both could, the kind that it did not run last. Memory admits tasks by one
of two rules (``Admission``).
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
    """Rule by which a rank's memory admits tasks."""

    GATE = "gate"
    """A task that does not fit closes its queue for now, as in the paper; rows may deadlock."""
    RESERVE = "reserve"
    """A microbatch enters if its total memory fits on every rank; an admitted one always ends."""


def simulate(graph: TaskGraph, orders: Orders) -> Timed | Deadlock:
    """Simulates orders: each task starts as soon as its row is free, its inputs have arrived, and its memory fits.

    If two rows of a rank could start at one time and memory fits one, the lower row starts.

    Raises:
        ValueError: A row lacks one of its tasks, or has another one.
    """
    return _answer(load_search().replay(graph.compiled, orders))


def roll_out(
    graph: TaskGraph, ranking: Sequence[int] | None = None, *, admission: Admission = Admission.RESERVE
) -> tuple[Orders, Timed] | Deadlock:
    """Returns orders and times for a ranking of groups, by default their natural order.

    Raises:
        ValueError: The ranking lacks a group, or has one twice.
    """
    groups = graph.compiled.natural_ranking if ranking is None else ranking
    orders, replayed = load_search().roll_out(graph.compiled, groups, is_gated=admission == Admission.GATE)
    answer = _answer(replayed)
    return answer if isinstance(answer, Deadlock) else (tuple(map(tuple, orders)), answer)


def deadlock_of(deadlock: _search.Deadlock) -> Deadlock:
    """Converts the extension's deadlock."""
    return Deadlock(waiting=tuple(deadlock.waiting), at_ns=deadlock.at_ns, short_bytes=tuple(deadlock.short_bytes))


def _answer(replayed: _search.Replayed) -> Timed | Deadlock:
    if replayed.deadlock is not None:
        return deadlock_of(replayed.deadlock)
    starts, peaks = tuple(replayed.start_ns), tuple(replayed.peak_bytes)
    return Timed(start_ns=starts, makespan_ns=replayed.makespan_ns, peak_bytes=peaks)
