"""A step, planned: cut, ordered, and with what becomes of activations, so that every rank's memory holds.

As a score (PipeWeaver, section 6): order the tasks as if memory had no limit; where some rank's memory does not hold,
choose what is kept and what is made again in that order; beside it, search for orders that hold with everything kept,
and, with what was chosen, for better ones. The shortest step that holds is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mosaic.errors import InfeasibleError
from mosaic.hardware import Cluster, Link
from mosaic.pipeline.bounds import bound
from mosaic.pipeline.costs import PairKey, Strategies
from mosaic.pipeline.order.search import DEFAULT_METHOD, OrderLimits, Searched, search_orders
from mosaic.pipeline.order.simulate import simulate
from mosaic.pipeline.pair_layers import pair_layers
from mosaic.pipeline.partition.methods import partition_by
from mosaic.pipeline.partition.partition import Partition
from mosaic.pipeline.partition.request import Request
from mosaic.pipeline.schedule.lower import lower
from mosaic.pipeline.schedule.schedule import PipelineSchedule
from mosaic.pipeline.task_graph import task_graph, training_chunks
from mosaic.pipeline.tasks import Deadlock, Orders, TaskGraph, Timed
from mosaic.pipeline.tuning.candidates import Candidates
from mosaic.pipeline.tuning.pairs import Pair, pairs_of, with_candidates
from mosaic.pipeline.tuning.shortage import MemoryShortage
from mosaic.pipeline.tuning.tune import Tuned, tune
from mosaic.pipeline.workload.microbatch import Microbatch

_FIRST_SHARE = 0.4
"""Of the time, for the order without limits; the rest is for orders that hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpace:
    """What ranks are to the planner."""

    network: Link | Cluster | None = None
    """Between them; None: what is sent takes no time."""
    devices_per_rank: int = 1
    """Devices of one rank: tensor times context parallel."""
    limit_bytes: int = 0
    """Memory of each of a rank's devices; 0: no limit."""

    def tasks(
        self, request: Request, partition: Partition, microbatches: Sequence[Microbatch], **options: object
    ) -> TaskGraph:
        """Returns the tasks of a step on these ranks; ``options`` are those of ``task_graph``."""
        limits = (self.limit_bytes,) * partition.num_ranks if self.limit_bytes else ()
        return task_graph(
            request.model,
            partition,
            microbatches,
            network=self.network,
            devices_per_rank=self.devices_per_rank,
            limit_bytes=limits,
            **options,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions:
    """How a step is planned."""

    partition: str = "separated"
    """A name of ``PARTITION_METHODS``."""
    method: str = DEFAULT_METHOD
    """A name of ``mosaic.pipeline.order.search.METHODS``."""
    limits: OrderLimits = field(default_factory=OrderLimits)
    """Of all searches of the step together."""
    candidates: int = 8
    """Combinations of strategies for each forward with its backward, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """What was planned for one step."""

    partition: Partition
    """Chunks on ranks."""
    graph: TaskGraph
    """Tasks, with the times and bytes of the chosen strategies."""
    orders: Orders
    """Of each row."""
    timed: Timed
    """Its simulation."""
    bound_ns: int
    """No orders and no strategies of this partition end earlier."""
    strategies: Strategies = "keep"
    """What becomes of activations."""
    training: tuple[int, ...] = ()
    """Chunks with gradients to reduce."""

    @property
    def makespan_ns(self) -> int:
        """When the last task ends."""
        return self.timed.makespan_ns

    @property
    def gap(self) -> float:
        """By how much the step may be longer than the best of this partition, as a share of the bound."""
        return self.makespan_ns / self.bound_ns - 1 if self.bound_ns else 0.0

    def schedule(self) -> PipelineSchedule:
        """Returns the actions that ranks execute."""
        return lower(self.partition, self.graph, self.orders, strategies=self.strategies, training=self.training)


def plan_step(
    request: Request,
    microbatches: Sequence[Microbatch],
    *,
    space: RankSpace | None = None,
    options: PlannerOptions | None = None,
    partition: Partition | None = None,
) -> PlannedStep:
    """Plans one step.

    Args:
        request: Model, ranks, and the microbatches that its partition is made for.
        microbatches: The step's.
        space: What ranks are.
        options: How to plan.
        partition: Where layers are already; None: it is made.

    Raises:
        InfeasibleError: Nothing that was tried fits in memory; says which rank, when, by how much, and what helps.
        ValueError: See ``partition_by``, ``task_graph`` and ``search_orders``.
    """
    space, options = space or RankSpace(), options or PlannerOptions()
    partition = partition or partition_by(options.partition, request)
    graph = space.tasks(request, partition, microbatches)
    planner = _Planner(graph, options, lambda: _pairs(request, partition, microbatches, graph, options.candidates))
    orders, chosen, timed, strategies = planner.run()
    return PlannedStep(
        partition=partition,
        graph=chosen,
        orders=orders,
        timed=timed,
        bound_ns=planner.bound_ns,
        strategies=strategies,
        training=training_chunks(request.model, partition),
    )


def _pairs(
    request: Request, partition: Partition, microbatches: Sequence[Microbatch], graph: TaskGraph, count: int
) -> tuple[Pair, ...]:
    layers = pair_layers(request.model, partition, microbatches)
    candidates = Candidates(count=count)
    return pairs_of(graph, lambda task: candidates.of(layers[task.chunk, task.microbatch, task.piece]))


_Found = tuple[Orders, TaskGraph, Timed, Strategies]


class _Planner:
    """One step, as it is planned."""

    def __init__(self, graph: TaskGraph, options: PlannerOptions, pairs: Callable[[], tuple[Pair, ...]]) -> None:
        self.graph, self.options, self.make_pairs = graph, options, pairs
        self.free = replace(graph, limit_bytes=())
        self.bound_ns = bound(self.free).ns
        self.began = time.monotonic()
        self.found: list[_Found] = []

    def run(self) -> _Found:
        is_limited = any(self.graph.limit_bytes)
        first = self._search(self.free, _FIRST_SHARE if is_limited else 1.0)
        assert isinstance(first, Searched)  # without limits nothing waits for memory
        if not is_limited or self._holds(first.timed):
            return first.orders, self.graph, first.timed, "keep"
        self._note(self.graph, self._search(self.graph, 0.3), "keep")
        pairs = self.make_pairs()
        shortage = self._tune(pairs, first.orders)
        if shortage is not None:  # orders of what keeps least, and then what else has room in them
            leanest = with_candidates(self.graph, pairs, tuple(pair.leanest for pair in pairs))
            lean = self._search(leanest, 0.5)
            self._note(leanest, lean, strategies_of(self.graph, pairs, tuple(pair.leanest for pair in pairs)))
            if isinstance(lean, Searched):
                self._tune(pairs, lean.orders)
        if not self.found:
            raise InfeasibleError("no order and no strategy that was tried fits in memory", reasons=[str(shortage)])
        return min(self.found, key=lambda one: one[2].makespan_ns)

    def _tune(self, pairs: Sequence[Pair], orders: Orders) -> MemoryShortage | None:
        """Chooses strategies in these orders, then searches for better orders with them."""
        tuned = tune(self.graph, pairs, partial(simulate, orders=orders))
        if isinstance(tuned, MemoryShortage):
            return tuned
        assert isinstance(tuned, Tuned)  # the orders have run before
        strategies = strategies_of(self.graph, pairs, tuned.choice)
        self.found.append((orders, tuned.graph, tuned.timed, strategies))
        self._note(tuned.graph, self._search(tuned.graph, 1.0), strategies)
        return None

    def _search(self, graph: TaskGraph, share: float) -> Searched | Deadlock:
        """Searches for a share of the time that is left."""
        limits = self.options.limits
        if limits.seconds is not None:
            left_s = max(0.0, limits.seconds - (time.monotonic() - self.began))
            limits = replace(limits, seconds=share * left_s)
        if limits.rollouts is not None:
            limits = replace(limits, rollouts=max(1, round(share * limits.rollouts)))
        return search_orders(graph, method=self.options.method, limits=limits)

    def _note(self, graph: TaskGraph, searched: Searched | Deadlock, strategies: Strategies) -> None:
        if isinstance(searched, Searched):
            self.found.append((searched.orders, graph, searched.timed, strategies))

    def _holds(self, timed: Timed) -> bool:
        pairs = zip(timed.peak_bytes, self.graph.limit_bytes, strict=True)
        return all(peak <= limit for peak, limit in pairs if limit)


def strategies_of(graph: TaskGraph, pairs: Sequence[Pair], choice: Sequence[int]) -> dict[PairKey, tuple[int, ...]]:
    """Returns for each pair the index of each of its layers' strategies."""
    found = {}
    for pair, chosen in zip(pairs, choice, strict=True):
        task = graph.tasks[pair.forward]
        found[task.chunk, task.microbatch, task.piece] = pair.candidates[chosen].strategies
    return found
