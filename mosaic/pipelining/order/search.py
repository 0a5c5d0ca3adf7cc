"""Searches for orders: any-time, on as many threads as asked for, with a bound beside what they find."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mosaic.pipelining.bounds import bound
from mosaic.pipelining.order.simulate import deadlock_of
from mosaic.pipelining.tasks import Deadlock, Orders, TaskGraph, Timed
from mosaic.search_extension import load_search

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "natural": "groups as they come, once",
        "tree": "Monte-Carlo tree search over which group comes next (PipeWeaver, Algorithm 1)",
        "shifts": "local search: a group goes to another place of the ranking",
        "swaps": "shifts, in turn with swaps of tasks on critical ways, which reach orders that no ranking gives",
    }
)
"""Ways to search, and what each does. None is worse than ``natural``, which all of them try first."""
DEFAULT_METHOD = "swaps"
_TASKS_A_SECOND = 15e6
"""That roll-outs place on one core: 12 to 24 million were measured, for steps of 32 to 1,440 tasks."""
_NO_LIMIT = 2**62
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderLimits:
    """What ends a search.

    Raises:
        ValueError: A limit is out of range.
    """

    effort: float = 1.0
    """Work: tasks that roll-outs place, counted in about seconds of a core for each thread, so the same on any machine
    under any load. 0: the first ranking alone."""
    rollouts: int | None = None
    """Roll-outs of all threads together, in the place of the effort; a replay of orders counts as one."""
    seconds: float = math.inf
    """Wall clock, for the extraordinary: what it ends depends on the machine."""
    threads: int = 1
    """Threads, each with numbers drawn of its own."""
    seed: int = 0
    """The same seed and number of threads give the same answer, unless the clock or ``should_stop`` ends the search."""
    should_stop: Callable[[], bool] | None = None
    """Asked several times a second; once it says so, the search returns its best so far."""

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
        """Whether no effort is left."""
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
        """Returns how many roll-outs of a step of so many tasks a search may make."""
        if self.rollouts is not None:
            return self.rollouts
        wanted = self.threads * self.effort * _TASKS_A_SECOND / max(1, num_tasks)
        return max(1, round(min(wanted, _NO_LIMIT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The best orders that a search found, and how good they surely are."""

    method: str
    """A name of ``METHODS``."""
    orders: Orders
    """Of each row."""
    timed: Timed
    """When tasks start, the makespan, and what ranks use at most."""
    bound_ns: int
    """No orders end earlier."""
    num_rollouts: int
    """Tried in all."""
    num_deadlocks: int
    """Of these, rankings whose rows came to wait for ever."""
    progress: tuple[tuple[float, int], ...] = field(default=())
    """Seconds since the search began, and the makespan that was best from then on."""

    @property
    def makespan_ns(self) -> int:
        """When the last task ends."""
        return self.timed.makespan_ns

    @property
    def effort(self) -> float:
        """What of ``OrderLimits.effort`` it took, on one thread."""
        return self.num_rollouts * len(self.timed.start_ns) / _TASKS_A_SECOND

    @property
    def gap(self) -> float:
        """By how much it may be longer than the best, as a share of the bound."""
        return self.makespan_ns / self.bound_ns - 1 if self.bound_ns > 0 else 0.0


def search_orders(
    graph: TaskGraph,
    *,
    method: str = DEFAULT_METHOD,
    limits: OrderLimits | None = None,
    bound_ns: int | None = None,
) -> Searched | Deadlock:
    """Returns the best orders found, or how the first ranking's rows came to wait for ever where all do.

    Args:
        graph: Tasks of a step.
        method: A name of ``METHODS``.
        limits: When to stop.
        bound_ns: What no orders are below, where it is known already.

    Raises:
        ValueError: The method is not known.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not known; use one of {', '.join(METHODS)}")
    limits = limits or OrderLimits()
    least = bound(graph).ns if bound_ns is None else bound_ns
    search = load_search()
    found = search.find_orders(
        graph.compiled,
        method,
        seconds=limits.seconds,
        max_rollouts=limits.rollouts_of(len(graph.tasks)),
        num_threads=limits.threads,
        seed=limits.seed,
        bound_ns=least,
        should_stop=limits.should_stop,
    )
    if not found.has_any:
        return deadlock_of(found.deadlock)
    starts = tuple(found.start_ns)
    peak_bytes = tuple(search.peak(graph.compiled, found.orders, starts))
    timed = Timed(start_ns=starts, makespan_ns=found.makespan_ns, peak_bytes=peak_bytes)
    return Searched(
        method=method,
        orders=tuple(map(tuple, found.orders)),
        timed=timed,
        bound_ns=least,
        num_rollouts=found.num_rollouts,
        num_deadlocks=found.num_deadlocks,
        progress=tuple(found.progress),
    )
