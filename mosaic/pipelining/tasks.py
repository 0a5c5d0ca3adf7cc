"""Tasks of one step on ranks, with what each waits for: what simulations, searches and bounds work on.

Times are whole nanoseconds and memory whole bytes, so that the same order gives the same times to the last digit,
whoever computes them.
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
"""For each row the indices of its tasks, in the order in which it runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One phase of one chunk with one piece of a microbatch."""

    row: int
    """Who runs it; a row runs one task at a time."""
    kind: ActionKind
    """Forward, backward (for inputs, and for weights unless they are apart), or backward for weights apart."""
    parts: tuple[Part, ...]
    """What runs, in order; several where a chunk mixes modules."""
    microbatch: int
    """Index in the step."""
    piece: int = 0
    """Index of its sub-microbatch in the microbatch."""
    chunk: int = 0
    """Index of its chunk in the partition."""
    time_ns: int
    """How long it takes."""
    group: int = 0
    """Index of the group whose priority orders it: all tasks of one microbatch in one module."""
    takes_bytes: int = 0
    """In use on its rank from its start on."""
    frees_bytes: int = 0
    """No longer in use from its end on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """``target`` starts no earlier than ``lag_ns`` after the end of ``source``."""

    source: int
    """Index of a task."""
    target: int
    """Index of a task."""
    lag_ns: int = 0
    """Time that what is sent takes."""
    num_bytes: int = 0
    """What is handed over: 0 where a task only waits for its own other phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Tasks of one step.

    Raises:
        ValueError: An index, a time or a number of bytes is no whole number or out of range, tasks of a rank free more
            than they take, or tasks wait for each other in a circle.
        BackendUnavailableError: The extension ``mosaic._search`` is not built.
    """

    tasks: tuple[Task, ...]
    """All of them. Those of one group and kind that could start at one time start in this order."""
    waits: tuple[Wait, ...]
    """What they wait for, rows apart."""
    rank_of: tuple[int, ...]
    """For each row its rank. Rows of one rank are lanes: they run at the same time, and share its memory."""
    base_bytes: tuple[int, ...] = ()
    """In use on each rank all the time; empty: nothing."""
    limit_bytes: tuple[int, ...] = ()
    """Memory of each rank, 0 where it has no limit; empty: none has."""
    compiled: _search.Tasks = field(init=False, repr=False, compare=False)
    """As simulations and searches have it."""

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
        """Rows."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return max(self.rank_of, default=-1) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A simulated step."""

    start_ns: Sequence[int]
    """Of each task."""
    makespan_ns: int
    """When the last one ends."""
    peak_bytes: tuple[int, ...]
    """Most in use on each rank, what is always in use included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlock:
    """Orders that cannot run to the end: every row waits."""

    waiting: tuple[int, ...]
    """For each row that has not ended the task that it waits to start."""
    at_ns: int
    """When the last task before that ended."""
    short_bytes: tuple[int, ...]
    """For each rank by how much its memory is too small for what it waits to start; 0 where it is not in the way."""
