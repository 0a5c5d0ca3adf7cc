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
        "random": "rankings drawn at random",
        "depth_first": "all rankings, those that differ at their ends first",
        "tree": "Monte-Carlo tree search over which group comes next (PipeWeaver, Algorithm 1)",
        "shifts": "local search: a group goes to another place of the ranking",
        "swaps": "shifts, in turn with swaps of tasks on critical ways, which reach orders that no ranking gives",
    }
)
"""Ways to search, and what each does. None is worse than ``natural``, which all of them try first."""
DEFAULT_METHOD = "swaps"
_NO_LIMIT = 2**62
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderLimits:
    """What ends a search.

    Raises:
        ValueError: A limit is out of range, or there is none.
    """

    seconds: float | None = 1.0
    """Wall clock; None: roll-outs alone end the search."""
    rollouts: int | None = None
    """Roll-outs of all threads together; a replay of orders counts as one. None: the clock alone ends the search."""
    threads: int = 1
    """Threads, each with numbers drawn of its own."""
    seed: int = 0
    """The same seed and number of threads give the same answer where roll-outs end the search. Under a clock they give
    the same steps, of which a faster machine takes more; that holds for each thread, so with several the answer may
    differ from run to run even in the step that it stems from."""
    should_stop: Callable[[], bool] | None = None
    """Asked several times a second; once it says so, the search returns its best so far."""

    def __post_init__(self) -> None:
        if self.seconds is None and self.rollouts is None:
            raise ValueError("neither seconds nor rollouts end the search; give one of them")
        if self.seconds is not None and not self.seconds >= 0:
            raise ValueError(f"seconds={self.seconds}; use 0 or more, or None")
        if self.rollouts is not None and not 0 <= self.rollouts <= _NO_LIMIT:
            raise ValueError(f"rollouts={self.rollouts}; use 0 to {_NO_LIMIT}, or None")
        if not 0 <= self.seed <= _MAX_SEED:
            raise ValueError(f"seed={self.seed}; use 0 to {_MAX_SEED}")
        if self.threads < 1:
            raise ValueError(f"threads={self.threads}; use 1 or more")

    def share(self, share: float) -> OrderLimits:
        """Returns a share of the time and of the roll-outs, at least one."""
        return replace(
            self,
            seconds=None if self.seconds is None else share * self.seconds,
            rollouts=None if self.rollouts is None else max(1, round(share * self.rollouts)),
        )


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
        seconds=math.inf if limits.seconds is None else limits.seconds,
        max_rollouts=_NO_LIMIT if limits.rollouts is None else limits.rollouts,
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
