"""Orders of a step's tasks and activation strategies within every rank's memory.

As a score (PipeWeaver, section 6): order the tasks without memory limits; if a rank's memory does not hold, choose
strategies in that order; also search for orders that hold with everything kept, and for better ones with the chosen
strategies. The shortest that holds is the result.
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
from mosaic.pipelining.tuning import MemoryShortage, Pair, Tuned, tune, with_candidates

_FIRST_SHARE = 0.4
"""Share of the effort for the order without limits; the rest is for orders that hold."""

Fitting = tuple[Orders, TaskGraph, Timed, Strategies]
"""Orders, tasks with the times and bytes of the strategies, their simulation, and the strategies."""


def plan_within_memory(
    graph: TaskGraph, pairs: Callable[[], tuple[Pair, ...]], *, method: str, limits: OrderLimits
) -> Fitting:
    """Returns the shortest fitting orders and strategies.

    Args:
        graph: A step's tasks with everything kept, and memory limits.
        pairs: Makes forwards with their backwards and candidates; called if memory is short.
        method: A name of ``mosaic.pipelining.order.search.METHODS``.
        limits: Limits of all searches together.

    Raises:
        InfeasibleError: No tried plan fits; the message has rank, time, shortage and remedies.
    """
    return _Planning(graph, pairs, method, limits).run()


class _Planning:
    """State of one step's planning."""

    def __init__(
        self, graph: TaskGraph, pairs: Callable[[], tuple[Pair, ...]], method: str, limits: OrderLimits
    ) -> None:
        self.graph, self.make_pairs, self.method, self.limits = graph, pairs, method, limits
        self.free = replace(graph, limit_bytes=())
        self.began, self.effort_left = time.monotonic(), limits.effort
        self.fitting: list[Fitting] = []

    def run(self) -> Fitting:
        is_limited = any(self.graph.limit_bytes)
        first = self._search(self.free, _FIRST_SHARE if is_limited else 1.0)
        assert isinstance(first, Searched)  # without limits nothing waits for memory
        if not is_limited or self._holds(first.timed):
            return first.orders, self.graph, first.timed, "keep"
        self._note(self.graph, self._search(self.graph, 0.3), "keep")
        pairs = self.make_pairs()
        shortage = self._tune(pairs, first.orders)
        if shortage is not None or not self.fitting:  # leanest strategies first, then faster ones that fit in the order
            leanest = with_candidates(self.graph, pairs, tuple(pair.leanest for pair in pairs))
            lean = self._search(leanest, 0.5)
            self._note(leanest, lean, strategies_of(self.graph, pairs, tuple(pair.leanest for pair in pairs)))
            if isinstance(lean, Searched):
                self._tune(pairs, lean.orders)
            elif not self.fitting:
                reason = str(shortage or _stuck(lean))
                raise InfeasibleError("no order and no strategy that was tried fits in memory", reasons=[reason])
        return min(self.fitting, key=lambda plan: plan[2].makespan_ns)

    def _tune(self, pairs: Sequence[Pair], orders: Orders) -> MemoryShortage | None:
        """Chooses strategies in these orders, then searches for better orders with them."""
        tuned = tune(self.graph, pairs, partial(simulate, orders=orders))
        if isinstance(tuned, MemoryShortage):
            return tuned
        assert isinstance(tuned, Tuned)  # the orders have run before
        strategies = strategies_of(self.graph, pairs, tuned.choice)
        if self._holds(tuned.timed):  # tuning ignores the memory of tasks without time
            self.fitting.append((orders, tuned.graph, tuned.timed, strategies))
        self._note(tuned.graph, self._search(tuned.graph, 1.0), strategies)
        return None

    def _search(self, graph: TaskGraph, share: float) -> Searched | Deadlock:
        """Searches with a share of the remaining effort."""
        left_s = max(0.0, self.limits.seconds - (time.monotonic() - self.began))
        limits = replace(self.limits, effort=self.effort_left, seconds=left_s).share(share)
        searched = search_orders(graph, method=self.method, limits=limits)
        spent = searched.effort / limits.threads if isinstance(searched, Searched) else limits.effort
        self.effort_left = max(0.0, self.effort_left - spent)
        return searched

    def _note(self, graph: TaskGraph, searched: Searched | Deadlock, strategies: Strategies) -> None:
        if isinstance(searched, Searched):
            self.fitting.append((searched.orders, graph, searched.timed, strategies))

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
    """Returns the strategy index of each layer, by pair."""
    strategies = {}
    for pair, candidate in zip(pairs, choice, strict=True):
        task = graph.tasks[pair.forward]
        strategies[task.chunk, task.microbatch, task.piece] = pair.candidates[candidate].strategies
    return strategies
