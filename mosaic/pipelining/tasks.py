"""Task graphs for ``mosaic._search``, checked and compiled once.

Tasks of one step on ranks with their waits: the input of simulations, searches and bounds.

Times are whole nanoseconds and memory whole bytes: the same order gives exactly the same times in every
implementation.

Simulation of orders, and roll-out of a ranking of groups.

A roll-out interleaves forwards and backwards as in PipeWeaver 6.2: a free row runs the first task by ranking that could
start by now, and if a forward and a backward both could, the kind that it did not run last. Memory admits tasks by one
of two rules (``Admission``).

Lower bounds of a step's makespan, in a fraction of the time of a search.

Each is proven for every schedule of the task graph:

* ``load``: a row runs one task at a time.
* ``critical_path``: the longest path through waits, with lags.
* ``one_machine``: Jackson's preemptive schedule of each row with a head and a tail for each task. Heads and
  tails are longest paths, longer where several tasks of one row feed one task (pieces of a microbatch that the backbone
  waits for) by the row's time for all of them.

Memory bounds nothing here.

Memory of ranks over a step, and time of their gradient sums over data-parallel ranks.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from mosaic.graph import Part
from mosaic.search_extension import load_search

if TYPE_CHECKING:
    from mosaic import _search


class ActionKind(StrEnum):
    """Kind of computation, by its letter in schedules."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


KINDS = {kind: number for number, kind in enumerate(ActionKind)}
"""The extension's numbers of task kinds."""
_MAX_WHOLE = 2**63


def compile_tasks(
    tasks: Sequence[object],
    waits: Sequence[object],
    *,
    rank_of: Sequence[int],
    base_bytes: Sequence[int],
    limit_bytes: Sequence[int],
) -> _search.Tasks:
    """Checks tasks and waits (``Task`` and ``Wait``) and compiles them for searches.

    Raises:
        ValueError: A figure is not a whole number or out of range, or tasks wait for each other in a circle.
    """
    columns = [_column("task", tasks, name) for name in ("row", "microbatch", "group", "time_ns", *_BYTES)]
    columns.insert(1, array("q", [KINDS[kind] for kind in map(operator.attrgetter("kind"), tasks)]))
    compiled: _search.Tasks = load_search().Tasks(
        columns,
        [_column("wait", waits, name) for name in ("source", "target", "lag_ns")],
        rank_of=_whole("rank_of", rank_of),
        base_bytes=_whole("base_bytes", base_bytes),
        limit_bytes=_whole("limit_bytes", limit_bytes),
    )
    return compiled


_BYTES = ("takes_bytes", "frees_bytes")


def _column(what: str, of: Iterable[object], name: str) -> array[int]:
    read = operator.attrgetter(name)
    try:
        return array("q", map(read, of))
    except (TypeError, OverflowError):
        for index, each in enumerate(of):
            _whole(f"{name} of {what} {index}", [read(each)])
        raise


def _whole(name: str, values: Sequence[int]) -> array[int]:
    for value in values:
        if not hasattr(value, "__index__") or not -_MAX_WHOLE <= value < _MAX_WHOLE:
            raise ValueError(f"{name} is {value!r}; use a whole number of at most 63 bits")
    return array("q", values)


Orders = tuple[tuple[int, ...], ...]
"""Indices of each row's tasks, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One phase of one chunk with one piece of a microbatch."""

    row: int
    """Its row, which runs one task at a time."""
    kind: ActionKind
    """Forward, backward (for inputs, and for weights unless they are apart), or backward for weights apart."""
    parts: tuple[Part, ...]
    """Its parts in order; several in a chunk of several modules."""
    microbatch: int
    """Index in the step."""
    piece: int = 0
    """Index of its sub-microbatch in the microbatch."""
    chunk: int = 0
    """Index of its chunk in the partition."""
    time_ns: int
    group: int = 0
    """Index of the group whose priority orders it: all tasks of one microbatch in one module."""
    takes_bytes: int = 0
    """Bytes that it allocates on its rank at its start."""
    frees_bytes: int = 0
    """Bytes that it frees at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """``target`` starts no earlier than ``lag_ns`` after the end of ``source``."""

    source: int
    """Index of a task."""
    target: int
    """Index of a task."""
    lag_ns: int = 0
    """Time of the message."""
    num_bytes: int = 0
    """Bytes of the message; 0 between phases of one chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Tasks of one step.

    Raises:
        ValueError: An index, a time or a number of bytes is not a whole number or out of range, tasks of a rank free
            more than they take, or tasks wait for each other in a circle.
        BackendUnavailableError: The extension ``mosaic._search`` is not built.
    """

    tasks: tuple[Task, ...]
    """All tasks. Tasks of one group and kind that could start at one time start in this order."""
    waits: tuple[Wait, ...]
    """Their waits, beside the order of rows."""
    rank_of: tuple[int, ...]
    """Rank of each row. Rows of one rank are lanes: they run at the same time, and share its memory."""
    base_bytes: tuple[int, ...] = ()
    """Constant bytes of each rank; empty: none."""
    limit_bytes: tuple[int, ...] = ()
    """Memory of each rank, 0 for no limit; empty: no limits."""
    compiled: _search.Tasks = field(init=False, repr=False, compare=False)
    """The graph for simulations and searches."""

    def __post_init__(self) -> None:
        compiled = compile_tasks(
            self.tasks,
            self.waits,
            rank_of=self.rank_of,
            base_bytes=self.base_bytes,
            limit_bytes=self.limit_bytes,
        )
        object.__setattr__(self, "compiled", compiled)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return max(self.rank_of, default=-1) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A simulated step."""

    start_ns: Sequence[int]
    """Start of each task."""
    makespan_ns: int
    """End of the last task."""
    peak_bytes: tuple[int, ...]
    """Peak bytes of each rank, including the constant ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlock:
    """Orders that cannot run to the end: every row waits."""

    waiting: tuple[int, ...]
    """Next task of each unfinished row."""
    at_ns: int
    """End of the last finished task."""
    short_bytes: tuple[int, ...]
    """Bytes that each rank lacks for its waiting tasks; 0 if memory does not block them."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of a step's makespan."""

    load_ns: int
    """The largest sum of a row's times, the base of the bubble share."""
    critical_path_ns: int
    """The longest path."""
    one_machine_ns: int
    """Jackson's preemptive one-machine bound, the largest of all rows."""

    @property
    def ns(self) -> int:
        """The largest of them."""
        return max(self.load_ns, self.critical_path_ns, self.one_machine_ns)


def bound(graph: TaskGraph) -> Bounds:
    """Returns the lower bounds of a graph."""
    bounds = load_search().find_bounds(graph.compiled)
    return Bounds(
        load_ns=bounds.load_ns,
        critical_path_ns=bounds.way_ns,
        one_machine_ns=bounds.one_machine_ns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Bytes in use on one rank."""

    at_ns: tuple[int, ...]
    """Times of changes, ascending; the first is 0."""
    in_use_bytes: tuple[int, ...]
    """Bytes from each of these times up to the next."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes."""
        return max(self.in_use_bytes)

    @property
    def peak_ns(self) -> int:
        """First time of the peak."""
        return self.at_ns[self.in_use_bytes.index(self.peak_bytes)]

    def bytes_at(self, time_ns: int) -> int:
        """Returns the bytes in use at ``time_ns``; 0 before 0."""
        place = bisect.bisect_right(self.at_ns, time_ns)
        return self.in_use_bytes[place - 1] if place else 0


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
    return tuple(_timeline(own, base) for own, base in zip(changes, bases, strict=True))


def _timeline(changes: Iterable[tuple[int, int]], base_bytes: int) -> MemoryTimeline:
    """Returns a timeline from pairs of a time and a change of bytes; changes at one time count together."""
    at_ns, in_use_bytes = [0], [base_bytes]
    for time_ns, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        total = in_use_bytes[-1] + sum(change[1] for change in group)
        if time_ns == at_ns[-1]:
            in_use_bytes[-1] = total
        elif total != in_use_bytes[-1]:
            at_ns.append(time_ns)
            in_use_bytes.append(total)
    return MemoryTimeline(at_ns=tuple(at_ns), in_use_bytes=tuple(in_use_bytes))
