"""Tasks of one step on ranks with their waits, their simulation, lower bounds of a step, and its memory.

Times are whole nanoseconds and memory whole bytes: the same order gives exactly the same times in every
implementation.

A roll-out interleaves forwards and backwards as in PipeWeaver 6.2: a free row runs the first task by ranking that could
start by now, and if a forward and a backward both could, the kind that it did not run last. A microbatch enters where
its total memory fits on every rank; searches also try the paper's gate, which closes the queue of a task that does not.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

from mosaic import _search
from mosaic.graph import Part
from mosaic.pipelining.layers import Layer

Orders = tuple[tuple[int, ...], ...]
"""Indices of each row's tasks, in order."""

PairKey = tuple[int, int, int]
"""A forward and its backward: chunk, microbatch, piece."""


class ActionKind(StrEnum):
    """Kind of computation, by its letter in schedules."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


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
    target: int
    lag_ns: int = 0
    num_bytes: int = 0
    """Bytes of the message; 0 between phases of one chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Tasks of one step.

    Raises:
        ValueError: A number is out of range, a rank frees more than it takes, or tasks wait in a circle.
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
    layers: Mapping[PairKey, tuple[Layer, ...]] = field(default_factory=dict, repr=False, compare=False)
    """The layers of each pair with a backward, in the order of its chunk."""
    compiled: _search.Tasks = field(init=False, repr=False, compare=False)
    """The graph for simulations and searches."""

    def __post_init__(self) -> None:
        tasks = [_whole(name, [getattr(task, name) for task in self.tasks], "task") for name in _TASK_COLUMNS]
        tasks.insert(1, array("q", [_KINDS[task.kind] for task in self.tasks]))
        compiled = _search.Tasks(
            tasks,
            [_whole(name, [getattr(wait, name) for wait in self.waits], "wait") for name in _WAIT_COLUMNS],
            rank_of=_whole("rank_of", self.rank_of),
            base_bytes=_whole("base_bytes", self.base_bytes),
            limit_bytes=_whole("limit_bytes", self.limit_bytes),
        )
        object.__setattr__(self, "compiled", compiled)

    @property
    def num_rows(self) -> int:
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of, default=-1) + 1


_TASK_COLUMNS = ("row", "microbatch", "group", "time_ns", "takes_bytes", "frees_bytes")
_WAIT_COLUMNS = ("source", "target", "lag_ns")
_KINDS = {kind: number for number, kind in enumerate(ActionKind)}


def _whole(name: str, values: Sequence[int], of: str = "") -> array[int]:
    try:
        return array("q", values)
    except (TypeError, OverflowError):
        at, value = next(
            (at, value)
            for at, value in enumerate(values)
            if not (hasattr(value, "__index__") and -(2**63) <= value < 2**63)
        )
        place = f" of {of} {at}" if of else ""
        raise ValueError(f"{name}{place} is {value!r}; use a whole number of at most 63 bits") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    start_ns: Sequence[int]
    makespan_ns: int
    """End of the last task."""
    peak_bytes: tuple[int, ...]
    """Peak bytes of each rank, including the constant ones."""


Deadlock = _search.Deadlock
"""Orders that cannot run to the end: the next task of each unfinished row (``waiting``), the end of the last finished
task (``at_ns``), and the bytes that each rank lacks for its waiting tasks (``short_bytes``)."""


def simulate(graph: TaskGraph, orders: Orders) -> Timed | Deadlock:
    """Simulates orders: each task starts as soon as its row is free, its inputs have arrived, and its memory fits.

    If two rows of a rank could start at one time and memory fits one, the lower row starts.

    Raises:
        ValueError: A row lacks one of its tasks, or has another one.
    """
    return _timed(_search.replay(graph.compiled, orders))


def roll_out(graph: TaskGraph) -> tuple[Orders, Timed] | Deadlock:
    """Returns orders and times for the natural ranking of groups; a microbatch enters once its total memory fits."""
    orders, replayed = _search.roll_out(graph.compiled)
    timed = _timed(replayed)
    return timed if isinstance(timed, Deadlock) else (tuple(map(tuple, orders)), timed)


def _timed(replayed: _search.Replayed) -> Timed | Deadlock:
    if replayed.deadlock is not None:
        return replayed.deadlock
    starts, peaks = tuple(replayed.start_ns), tuple(replayed.peak_bytes)
    return Timed(start_ns=starts, makespan_ns=replayed.makespan_ns, peak_bytes=peaks)


def lower_bound_ns(graph: TaskGraph) -> int:
    """Returns a time that no orders of a graph are below, whatever memory admits: Jackson's one-machine bound.

    Of each row, the preemptive schedule of its tasks with a head and a tail (longest paths with lags); the longest
    row counts. Heads and tails are longer where several tasks of one row feed one task (pieces of a microbatch that
    the backbone waits for), by the row's time for all of them. It is at least the longest path, and at least each
    row's sum of times.
    """
    return _search.lower_bound(graph.compiled)


def memory_peaks(graph: TaskGraph, start_ns: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns each rank's peak bytes and their first time; changes at one time count together."""
    changes: list[dict[int, int]] = [{} for _ in range(graph.num_ranks)]
    for task, start in zip(graph.tasks, start_ns, strict=True):
        own, end = changes[graph.rank_of[task.row]], start + task.time_ns
        own[start] = own.get(start, 0) + task.takes_bytes
        own[end] = own.get(end, 0) - task.frees_bytes
    peaks = []
    for own, base_bytes in zip(changes, graph.base_bytes or (0,) * graph.num_ranks, strict=True):
        times = sorted(own)
        in_use = list(accumulate((own[time_ns] for time_ns in times), initial=base_bytes))
        peak = max(in_use)
        peaks.append((peak, [0, *times][in_use.index(peak)]))
    return tuple(peaks)
