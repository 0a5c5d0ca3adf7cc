"""Orders of a step's tasks, with what becomes of activations, so that every rank's memory holds.

As a score (PipeWeaver, section 6): order the tasks as if memory had no limit; where some rank's memory does not hold,
choose what is kept and what is made again in that order; beside it, search for orders that hold with everything kept,
and, with what was chosen, for better ones. The shortest that holds is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mosaic.errors import InfeasibleError
from mosaic.pipelining.costs import PairKey, Strategies
from mosaic.pipelining.order.search import OrderLimits, Searched, search_orders
from mosaic.pipelining.order.simulate import simulate
from mosaic.pipelining.tasks import Deadlock, Orders, TaskGraph, Timed
from mosaic.pipelining.tuning.pairs import Pair, with_candidates
from mosaic.pipelining.tuning.shortage import MemoryShortage
from mosaic.pipelining.tuning.tune import Tuned, tune

_FIRST_SHARE = 0.4
"""Of the effort, for the order without limits; the rest is for orders that hold."""

Found = tuple[Orders, TaskGraph, Timed, Strategies]
"""Orders, the tasks with the times and bytes of what was chosen, their simulation, and what was chosen."""


def plan_within_memory(
    graph: TaskGraph, pairs: Callable[[], tuple[Pair, ...]], *, method: str, limits: OrderLimits
) -> Found:
    """Returns the shortest orders and strategies found that fit.

    Args:
        graph: A step's tasks, everything kept, with limits of memory.
        pairs: Makes forwards with their backwards and the choices for them; called where memory is short.
        method: A name of ``mosaic.pipelining.order.search.METHODS``.
        limits: Of all searches together.

    Raises:
        InfeasibleError: Nothing that was tried fits; says which rank, when, by how much, and what helps.
    """
    return _Planning(graph, pairs, method, limits).run()


class _Planning:
    """One step under way."""

    def __init__(
        self, graph: TaskGraph, pairs: Callable[[], tuple[Pair, ...]], method: str, limits: OrderLimits
    ) -> None:
        self.graph, self.make_pairs, self.method, self.limits = graph, pairs, method, limits
        self.free = replace(graph, limit_bytes=())
        self.began, self.effort_left = time.monotonic(), limits.effort
        self.found: list[Found] = []

    def run(self) -> Found:
        is_limited = any(self.graph.limit_bytes)
        first = self._search(self.free, _FIRST_SHARE if is_limited else 1.0)
        assert isinstance(first, Searched)  # without limits nothing waits for memory
        if not is_limited or self._holds(first.timed):
            return first.orders, self.graph, first.timed, "keep"
        self._note(self.graph, self._search(self.graph, 0.3), "keep")
        pairs = self.make_pairs()
        shortage = self._tune(pairs, first.orders)
        if shortage is not None or not self.found:  # orders of what keeps least, and then what else has room in them
            leanest = with_candidates(self.graph, pairs, tuple(pair.leanest for pair in pairs))
            lean = self._search(leanest, 0.5)
            self._note(leanest, lean, strategies_of(self.graph, pairs, tuple(pair.leanest for pair in pairs)))
            if isinstance(lean, Searched):
                self._tune(pairs, lean.orders)
            elif not self.found:
                reason = str(shortage or _stuck(lean))
                raise InfeasibleError("no order and no strategy that was tried fits in memory", reasons=[reason])
        return min(self.found, key=lambda one: one[2].makespan_ns)

    def _tune(self, pairs: Sequence[Pair], orders: Orders) -> MemoryShortage | None:
        """Chooses strategies in these orders, then searches for better orders with them."""
        tuned = tune(self.graph, pairs, partial(simulate, orders=orders))
        if isinstance(tuned, MemoryShortage):
            return tuned
        assert isinstance(tuned, Tuned)  # the orders have run before
        strategies = strategies_of(self.graph, pairs, tuned.choice)
        if self._holds(tuned.timed):  # tuning does not see what tasks that take no time use
            self.found.append((orders, tuned.graph, tuned.timed, strategies))
        self._note(tuned.graph, self._search(tuned.graph, 1.0), strategies)
        return None

    def _search(self, graph: TaskGraph, share: float) -> Searched | Deadlock:
        """Searches for a share of the effort that is left."""
        left_s = max(0.0, self.limits.seconds - (time.monotonic() - self.began))
        limits = replace(self.limits, effort=self.effort_left, seconds=left_s).share(share)
        searched = search_orders(graph, method=self.method, limits=limits)
        spent = searched.effort / limits.threads if isinstance(searched, Searched) else limits.effort
        self.effort_left = max(0.0, self.effort_left - spent)
        return searched

    def _note(self, graph: TaskGraph, searched: Searched | Deadlock, strategies: Strategies) -> None:
        if isinstance(searched, Searched):
            self.found.append((searched.orders, graph, searched.timed, strategies))

    def _holds(self, timed: Timed) -> bool:
        pairs = zip(timed.peak_bytes, self.graph.limit_bytes, strict=True)
        return all(peak <= limit for peak, limit in pairs if limit)


def _stuck(deadlock: Deadlock) -> str:
    short = max(deadlock.short_bytes)
    return (
        f"rank {deadlock.short_bytes.index(short)} is short of {short} bytes {deadlock.at_ns / 1e6:.3f} ms into the "
        "step; what would help: a higher limit, smaller microbatches, or more ranks"
    )


def strategies_of(graph: TaskGraph, pairs: Sequence[Pair], choice: Sequence[int]) -> dict[PairKey, tuple[int, ...]]:
    """Returns for each pair the index of each of its layers' strategies."""
    found = {}
    for pair, chosen in zip(pairs, choice, strict=True):
        task = graph.tasks[pair.forward]
        found[task.chunk, task.microbatch, task.piece] = pair.candidates[chosen].strategies
    return found
