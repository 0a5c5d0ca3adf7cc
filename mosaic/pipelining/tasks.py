"""Tasks of one step on ranks with their waits: the input of simulations, searches and bounds.

Times are whole nanoseconds and memory whole bytes: the same order gives exactly the same times in every
implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mosaic.graph import Part
from mosaic.pipelining.compiled import ActionKind, compile_tasks

if TYPE_CHECKING:
    from mosaic import _search

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
