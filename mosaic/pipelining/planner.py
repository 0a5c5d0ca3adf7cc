"""Plan of a step: partition, orders and activation strategies within every rank's memory.

Several partitions are planned in turn; those whose bound is above the best step are skipped, and the remaining effort
is for the best one again. Replicas of a pipeline share a step's microbatches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from mosaic.errors import InfeasibleError, unknown
from mosaic.pipelining.baselines import BASELINES, Baseline
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.layers import Microbatch
from mosaic.pipelining.orders import DEFAULT_METHOD, OrderLimits, Searched, search_orders
from mosaic.pipelining.partition import Partition, Request, layer_times
from mosaic.pipelining.schedule import PipelineSchedule, lower
from mosaic.pipelining.task_graph import RankSpace, Strategies, task_graph, training_chunks
from mosaic.pipelining.tasks import ActionKind, Deadlock, Orders, TaskGraph, Timed, lower_bound_ns, roll_out, simulate
from mosaic.pipelining.tuning import MemoryShortage, Pair, pairs_of, strategies_of, tune, with_candidates

AUTO = "auto"
TRIED = ("separated", "mixed-v", "mixed-time", "parallel")
"""Partition methods of ``auto``."""
UNIFORM_STRATEGIES = ("keep", "selective", "recompute")
"""Strategies of all layers, in the order in which a baseline tries them until its memory holds."""
_TRIAL_SHARE = 0.6
"""Share of the effort for all partitions together; the rest is for the best one again."""
_FIRST_SHARE = 0.4
"""Share of the effort for the order without limits; the rest is for orders that hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions:
    """Options of a step's planning."""

    partition: str = AUTO
    """A name of ``PARTITION_METHODS``; ``auto``: all of ``TRIED`` that fit the model."""
    method: str = DEFAULT_METHOD
    """A name of ``mosaic.pipelining.orders.METHODS``."""
    limits: OrderLimits = field(default_factory=OrderLimits)
    """Limits of all searches of the step together."""
    offload: bool = False
    """True if activations may wait in the host's memory; otherwise layers keep or recompute them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    partition: Partition
    graph: TaskGraph
    """Tasks, with the times and bytes of the chosen strategies."""
    orders: Orders
    timed: Timed
    bound_ns: int
    """Lower bound over all orders and strategies of this partition."""
    strategies: Strategies = "keep"
    training: tuple[int, ...] = ()
    """Chunks with gradients to reduce."""
    origin: str = ""
    """Methods of the partition and the order, or a baseline."""

    @property
    def makespan_ns(self) -> int:
        return self.timed.makespan_ns

    @property
    def gap(self) -> float:
        """Relative distance of the makespan from the bound of this partition."""
        return self.makespan_ns / self.bound_ns - 1 if self.bound_ns else 0.0

    @property
    def bubble_share(self) -> float:
        """The idle share of all ranks' time, averaged over lanes."""
        work = sum(task.time_ns for task in self.graph.tasks)
        return 1 - work / (self.makespan_ns * self.graph.num_rows) if self.makespan_ns else 0.0

    def schedule(self) -> PipelineSchedule:
        return lower(self.partition, self.graph, self.orders, strategies=self.strategies, training=self.training)


def plan_step(
    request: Request,
    microbatches: Sequence[Microbatch],
    *,
    space: RankSpace | None = None,
    options: PlannerOptions | None = None,
    partition: Partition | None = None,
    contenders: Mapping[str, PlannedStep | str] = MappingProxyType({}),
) -> PlannedStep:
    """Plans one step.

    Args:
        request: Model, ranks, and representative microbatches for the partition.
        microbatches: Microbatches of the step.
        space: The ranks.
        options: Partition, search and its limits.
        partition: A fixed partition; None: made by ``options``.
        contenders: Baselines of the step; a shorter one that ranks can run is the result.

    Raises:
        InfeasibleError: No tried plan fits in memory; the message has rank, time, shortage and remedies.
        ValueError: See ``partition_by``, ``task_graph`` and ``search_orders``.
    """
    job = _Job(request, microbatches, space or RankSpace(), options or PlannerOptions())
    limits = job.options.limits
    plans = [plan for plan in contenders.values() if not isinstance(plan, str)]
    plans = [plan for plan in plans if all(task.kind is not ActionKind.WEIGHTS for task in plan.graph.tasks)]
    cuts = sorted(job.cuts(partition), key=lambda cut: cut.makespan_ns)
    shortage = None
    best_cut: PlannedStep | None = None  # None if no partition may be shorter than a contender
    share = 1.0 if len(cuts) == 1 else _TRIAL_SHARE / len(cuts)
    for cut in cuts:
        if plans and (job.is_over() or cut.bound_ns >= min(plan.makespan_ns for plan in plans)):
            continue
        try:
            planned = _MemoryPlanning(cut, job.options.method, limits.share(share)).run()
        except InfeasibleError as error:
            shortage = shortage or error
            continue
        if all(planned.makespan_ns < plan.makespan_ns for plan in plans):
            best_cut = cut
        plans.append(planned)
    if not plans:
        assert shortage is not None
        raise shortage
    if len(cuts) > 1 and best_cut is not None and not job.is_over():
        with suppress(InfeasibleError):  # other draws than the first time; earlier plans stay
            rest = replace(limits.share(1 - _TRIAL_SHARE), seconds=job.seconds_left)
            plans.append(_MemoryPlanning(best_cut, job.options.method, rest).run())
    return min(plans, key=lambda planned: planned.makespan_ns)


def plan_baseline(
    name: str,
    request: Request,
    microbatches: Sequence[Microbatch],
    *,
    space: RankSpace | None = None,
    table: Mapping[str, Baseline] = BASELINES,
) -> PlannedStep:
    """Plans one step by a baseline: its fastest order that fits, with the first of ``UNIFORM_STRATEGIES`` that fits.

    Raises:
        InfeasibleError: It cannot run the step; has the reason.
        ValueError: The name is not in ``table``.
    """
    if name not in table:
        raise ValueError(unknown("baseline", name, table))
    baseline, space = table[name], space or RankSpace()
    try:
        partition = baseline.cut(request)
        graph_of = partial(
            task_graph, request.model, partition, microbatches, space, weights_apart=baseline.weights_apart
        )
        for strategy in UNIFORM_STRATEGIES:
            graph = graph_of(strategies=strategy)
            played = ((orders, simulate(graph, orders)) for orders in baseline.order(graph, partition))
            fits = [(orders, timed) for orders, timed in played if isinstance(timed, Timed) and _holds(graph, timed)]
            if fits:
                orders, timed = min(fits, key=lambda fit: fit[1].makespan_ns)
                return PlannedStep(
                    partition=partition,
                    graph=graph,
                    orders=orders,
                    timed=timed,
                    bound_ns=lower_bound_ns(graph if strategy == "keep" else graph_of()),
                    strategies=strategy,
                    training=training_chunks(request.model, partition),
                    origin=name,
                )
    except ValueError as error:
        raise InfeasibleError(f"{name} cannot run this step", reasons=[str(error)]) from None
    reason = f"its memory does not hold with any of {', '.join(UNIFORM_STRATEGIES)}"
    raise InfeasibleError(f"{name} cannot run this step", reasons=[reason])


def contend(
    request: Request,
    microbatches: Sequence[Microbatch],
    *,
    space: RankSpace | None = None,
    names: Sequence[str] = tuple(BASELINES),
    table: Mapping[str, Baseline] = BASELINES,
) -> dict[str, PlannedStep | str]:
    """Returns each baseline's step by name, or the reason why it cannot run.

    Raises:
        ValueError: A name is not in ``table``.
    """
    results: dict[str, PlannedStep | str] = {}
    for name in names:
        try:
            results[name] = plan_baseline(name, request, microbatches, space=space, table=table)
        except InfeasibleError as error:
            results[name] = error.reasons[0]
    return results


class _Job:
    def __init__(
        self, request: Request, microbatches: Sequence[Microbatch], space: RankSpace, options: PlannerOptions
    ) -> None:
        self.request, self.microbatches, self.space, self.options = request, microbatches, space, options
        self._end_s = time.monotonic() + options.limits.seconds

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def is_over(self) -> bool:
        limits = self.options.limits
        return limits.is_counted_out or not self.seconds_left or bool(limits.should_stop and limits.should_stop())

    def cuts(self, fixed: Partition | None) -> list[PlannedStep]:
        """Returns the partitions to try, in natural order without memory limits; without time the first alone.

        Raises:
            ValueError: No partition fits the model.
        """
        names = TRIED if self.options.partition == AUTO and fixed is None else (self.options.partition,)
        cuts: list[PlannedStep] = []
        problem = None
        for name in names:
            try:
                partition = fixed or partition_by(name, self.request)
            except ValueError as error:  # too few layers for it
                problem = problem or error
                continue
            if len(names) > 1 and len({chunk.rank for chunk in partition.chunks}) < self.request.num_ranks:
                continue  # ranks would do nothing
            if cuts and (self.is_over() or self.seconds_left < (1 - _TRIAL_SHARE) * self.options.limits.seconds):
                return cuts
            graph = task_graph(self.request.model, partition, self.microbatches, self.space)
            natural = roll_out(replace(graph, limit_bytes=()))
            assert not isinstance(natural, Deadlock)  # without limits nothing waits for memory
            orders, timed = natural
            cuts.append(
                PlannedStep(
                    partition=partition,
                    graph=graph,
                    orders=orders,
                    timed=timed,
                    bound_ns=lower_bound_ns(graph),
                    training=training_chunks(self.request.model, partition),
                    origin=f"{'given' if fixed else name}, {self.options.method}",
                )
            )
        if not cuts:
            raise problem or ValueError(f"no partition of {', '.join(names)} uses all ranks; use fewer")
        return cuts


class _MemoryPlanning:
    """Orders and strategies of one partition: the shortest of several searches that fits in memory."""

    def __init__(self, cut: PlannedStep, method: str, limits: OrderLimits) -> None:
        self.cut, self.graph, self.method, self.limits = cut, cut.graph, method, limits
        self.began, self.effort_left = time.monotonic(), limits.effort
        self.fitting: list[PlannedStep] = []

    def run(self) -> PlannedStep:
        """Returns the shortest orders and strategies that fit.

        Raises:
            InfeasibleError: None fits; the message has rank, time, shortage and remedies.
        """
        is_limited = any(self.graph.limit_bytes)
        first = self._search(replace(self.graph, limit_bytes=()), _FIRST_SHARE if is_limited else 1.0)
        assert isinstance(first, Searched)  # without limits nothing waits for memory
        if _holds(self.graph, first.timed):
            return replace(self.cut, orders=first.orders, timed=first.timed)
        self._note(self.graph, self._search(self.graph, 0.3), "keep")
        pairs = pairs_of(self.graph)
        shortage = self._tune(pairs, first.orders)
        if shortage is not None or not self.fitting:
            # leanest strategies first, then faster ones that fit in the order
            choice = [pair.leanest for pair in pairs]
            leanest = with_candidates(self.graph, pairs, choice)
            searched = self._search(leanest, 0.5)
            self._note(leanest, searched, strategies_of(self.graph, pairs, choice))
            if isinstance(searched, Searched):
                self._tune(pairs, searched.orders)
            if not self.fitting:
                reason = str(shortage or self._shortage(searched))
                raise InfeasibleError("no order and no strategy that was tried fits in memory", reasons=[reason])
        return min(self.fitting, key=lambda plan: plan.makespan_ns)

    def _tune(self, pairs: Sequence[Pair], orders: Orders) -> MemoryShortage | None:
        """Chooses strategies in these orders, then searches for better orders with them."""
        tuned = tune(self.graph, pairs, orders)
        if isinstance(tuned, MemoryShortage):
            return tuned
        strategies = strategies_of(self.graph, pairs, tuned.choice)
        if _holds(self.graph, tuned.timed):  # tuning ignores the memory of tasks without time
            self._add(tuned.graph, orders, tuned.timed, strategies)
        self._note(tuned.graph, self._search(tuned.graph, 1.0), strategies)
        return None

    def _search(self, graph: TaskGraph, share: float) -> Searched | Deadlock:
        left_s = max(0.0, self.limits.seconds - (time.monotonic() - self.began))
        limits = replace(self.limits, effort=self.effort_left, seconds=left_s).share(share)
        searched = search_orders(graph, method=self.method, limits=limits)
        spent = searched.effort / limits.threads if isinstance(searched, Searched) else limits.effort
        self.effort_left = max(0.0, self.effort_left - spent)
        return searched

    def _note(self, graph: TaskGraph, searched: Searched | Deadlock, strategies: Strategies) -> None:
        if isinstance(searched, Searched) and _holds(self.graph, searched.timed):
            self._add(graph, searched.orders, searched.timed, strategies)

    def _add(self, graph: TaskGraph, orders: Orders, timed: Timed, strategies: Strategies) -> None:
        self.fitting.append(replace(self.cut, graph=graph, orders=orders, timed=timed, strategies=strategies))

    def _shortage(self, searched: Searched | Deadlock) -> MemoryShortage:
        if isinstance(searched, Deadlock):
            short, at_ns = list(searched.short_bytes), searched.at_ns
        else:
            short, at_ns = _excess_bytes(self.graph, searched.timed), 0
        rank = short.index(max(short))
        return MemoryShortage(graph=self.graph, rank=rank, at_ns=at_ns, short_bytes=short[rank])


def _holds(graph: TaskGraph, timed: Timed) -> bool:
    """Returns True if peaks are within the limits: tasks wait for memory, what ranks hold all the time does not."""
    return max(_excess_bytes(graph, timed), default=0) <= 0


def _excess_bytes(graph: TaskGraph, timed: Timed) -> list[int]:
    limits = graph.limit_bytes or (0,) * graph.num_ranks
    return [peak - limit if limit else 0 for peak, limit in zip(timed.peak_bytes, limits, strict=True)]


Shares = tuple[tuple[int, ...], ...]
"""Indices of each replica's microbatches in the step, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """One step on all replicas."""

    shares: Shares
    schedules: tuple[PipelineSchedule | None, ...]
    """Schedule of each replica; None without microbatches."""


def share_out(times: Sequence[float], num_replicas: int) -> Shares:
    """Assigns each item to the replica with the least load, the longest first (Graham's LPT rule).

    The longest is at most 4/3 of the shortest possible longest share (https://doi.org/10.1137/0117039). The first
    replica has an item unless ``times`` is empty; others may have none.
    """
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [0.0] * num_replicas
    for item in sorted(range(len(times)), key=lambda at: (-times[at], at)):
        least = min(range(num_replicas), key=lambda at: (loads[at], len(shares[at]), at))
        shares[least].append(item)
        loads[least] += times[item]
    return tuple(tuple(sorted(share)) for share in shares)


def shares_of(request: Request, step: Sequence[Microbatch], num_replicas: int) -> Shares:
    """Divides a step by the times of its microbatches, over all phases of all layers."""
    if num_replicas == 1:
        return (tuple(range(len(step))),)
    times: dict[Microbatch, float] = {}
    for microbatch in dict.fromkeys(step):
        layers = layer_times(replace(request, microbatches=(microbatch,)))
        times[microbatch] = math.fsum(time_ms for own in layers.values() for time_ms in own)
    return share_out([times[microbatch] for microbatch in step], num_replicas)
