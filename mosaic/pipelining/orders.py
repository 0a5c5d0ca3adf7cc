"""Anytime searches for orders, on several threads, with a lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mosaic import _search
from mosaic.errors import unknown
from mosaic.pipelining.tasks import Deadlock, Orders, TaskGraph, Timed, lower_bound_ns

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "natural": "groups as they come, once",
        "tree": "Monte-Carlo tree search over which group comes next (PipeWeaver, Algorithm 1)",
        "shifts": "local search: a group moves in the ranking, a task in its row",
    }
)
"""Search methods with descriptions. All begin with ``natural``, so none is worse."""
DEFAULT_METHOD = "shifts"
_TASKS_A_SECOND = 15e6
"""Tasks that roll-outs place on one core: 12 to 24 million measured, for steps of 32 to 1,440 tasks."""
_NO_LIMIT = 2**62
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderLimits:
    """Limits of a search.

    Raises:
        ValueError: A limit is out of range.
    """

    effort: float = 1.0
    """Work of each thread: tasks that roll-outs place, in about seconds of a core, equal on any machine under any load.
    0: the first ranking alone."""
    rollouts: int | None = None
    """Roll-outs of all threads together, instead of the effort; a replay of orders counts as one."""
    seconds: float = math.inf
    """Wall-clock limit, for emergencies: the result then depends on the machine."""
    threads: int = 1
    """Threads, each with its own random numbers."""
    seed: int = 0
    """The same seed and number of threads give the same answer, unless the clock or ``should_stop`` ends the search."""
    should_stop: Callable[[], bool] | None = None
    """Called several times a second; after True the search returns its best so far."""

    def __post_init__(self) -> None:
        if not (self.effort >= 0 and self.seconds >= 0):
            raise ValueError(f"effort={self.effort}, seconds={self.seconds}; use values of 0 or more")
        if self.rollouts is not None and not 0 <= self.rollouts <= _NO_LIMIT:
            raise ValueError(f"rollouts={self.rollouts}; use 0 to {_NO_LIMIT}, or None")
        if not 0 <= self.seed <= _MAX_SEED:
            raise ValueError(f"seed={self.seed}; use 0 to {_MAX_SEED}")
        if self.threads < 1:
            raise ValueError(f"threads={self.threads}; use 1 or more")

    @property
    def is_counted_out(self) -> bool:
        return self.rollouts is None and self.effort == 0

    def share(self, share: float) -> OrderLimits:
        """Returns a share of the effort, of the time and of the roll-outs, at least one."""
        return replace(
            self,
            effort=share * self.effort,
            seconds=share * self.seconds,
            rollouts=None if self.rollouts is None else max(1, round(share * self.rollouts)),
        )

    def rollouts_of(self, num_tasks: int) -> int:
        if self.rollouts is not None:
            return self.rollouts
        num_rollouts = self.threads * self.effort * _TASKS_A_SECOND / max(1, num_tasks)
        return max(1, round(min(num_rollouts, _NO_LIMIT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    orders: Orders
    timed: Timed
    """Starts, makespan, and peak bytes."""
    bound_ns: int
    """Lower bound of all orders."""
    num_rollouts: int
    progress: tuple[tuple[float, int], ...] = field(default=())
    """Seconds since the start of the search, and the best makespan from then on."""

    @property
    def makespan_ns(self) -> int:
        return self.timed.makespan_ns

    @property
    def effort(self) -> float:
        """Spent ``OrderLimits.effort``, on one thread."""
        return self.num_rollouts * len(self.timed.start_ns) / _TASKS_A_SECOND


def search_orders(
    graph: TaskGraph,
    *,
    method: str = DEFAULT_METHOD,
    limits: OrderLimits | None = None,
    bound_ns: int | None = None,
) -> Searched | Deadlock:
    """Returns the best orders, or the first ranking's deadlock if all rankings deadlock.

    Raises:
        ValueError: The method is unknown.
    """
    if method not in METHODS:
        raise ValueError(unknown("method", method, METHODS))
    limits = limits or OrderLimits()
    least = lower_bound_ns(graph) if bound_ns is None else bound_ns
    result = _search.find_orders(
        graph.compiled,
        method,
        seconds=limits.seconds,
        max_rollouts=limits.rollouts_of(len(graph.tasks)),
        num_threads=limits.threads,
        seed=limits.seed,
        bound_ns=least,
        should_stop=limits.should_stop,
    )
    if not result.has_any:
        assert result.deadlock is not None, "a search ends with orders or a deadlock"
        return result.deadlock
    timed = Timed(start_ns=tuple(result.start_ns), makespan_ns=result.makespan_ns, peak_bytes=tuple(result.peak_bytes))
    return Searched(
        orders=tuple(map(tuple, result.orders)),
        timed=timed,
        bound_ns=least,
        num_rollouts=result.num_rollouts,
        progress=tuple(result.progress),
    )
