"""Plan of a step: partition, orders and activation strategies within every rank's memory.

Several partitions are planned in turn; those whose bound is above the best step are skipped, and the remaining effort
is for the best one again.

A step on replicas of a pipeline: the microbatches and the schedule of each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from mosaic.errors import InfeasibleError
from mosaic.graph import Part
from mosaic.pipelining.baselines import Contender, ContenderRun, contend
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.layers import Layer, LayeredModule, Microbatch, PipelineModel, Strategy
from mosaic.pipelining.orders import DEFAULT_METHOD, OrderLimits, Searched, search_orders
from mosaic.pipelining.partition import Chunk, Gradients, Partition, Request, even_pieces, gradients_of, layer_times
from mosaic.pipelining.schedule import PipelineSchedule, lower
from mosaic.pipelining.task_graph import PairKey, RankSpace, Strategies, on_lane, training_chunks
from mosaic.pipelining.tasks import Deadlock, Orders, TaskGraph, Timed, bound, roll_out, simulate
from mosaic.pipelining.tuning import Candidates, MemoryShortage, Pair, Tuned, pairs_of, tune, with_candidates

_KEEPS_NOTHING = Strategy(name="keep", kept_bytes=0)
_SKIPPED = Layer(forward_ms=0.0, backward_ms=0.0, weights_ms=0.0, strategies=(_KEEPS_NOTHING,))


def pair_layers(
    model: PipelineModel, partition: Partition, microbatches: Sequence[Microbatch]
) -> Mapping[PairKey, tuple[Layer, ...]]:
    """Returns the layers of each pair with a backward, in the order of ``Strategies``.

    A layer without a backward keeps nothing, and a skipped one does nothing: both have one strategy. The added time of
    strategies scales with a lane's share.
    """
    finder = _Finder(modules={module.name: module for module in model.modules})
    gradients: dict[frozenset[str], Mapping[str, Gradients]] = {}
    by_pair: dict[PairKey, tuple[Layer, ...]] = {}
    for index, microbatch in enumerate(microbatches):
        units = {name: count for name, module in finder.modules.items() if (count := module.units(microbatch))}
        present = frozenset(units)
        own = gradients.setdefault(present, gradients_of(model, present))
        for place, chunk in enumerate(partition.chunks):
            name = next((part.module for part in chunk.parts if part.module in own), None)
            if name is None or not any(_has_backward(part, own) for part in chunk.parts):
                continue
            for piece, count in enumerate(even_pieces(units[name], partition.sizes.get(name, units[name]))):
                counts = {**units, name: count}
                by_pair[place, index, piece] = finder.layers(place, chunk, own, microbatch, counts)
    return by_pair


def _has_backward(part: Part, gradients: Mapping[str, Gradients]) -> bool:
    own = gradients.get(part.module)
    return own is not None and any(own.any_of(layer) for layer in range(part.first, part.end))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finder:
    """Layers of chunks, those of equal pieces once."""

    modules: Mapping[str, LayeredModule]
    known: dict[object, tuple[Layer, ...]] = field(default_factory=dict)

    def layers(
        self,
        place: int,
        chunk: Chunk,
        gradients: Mapping[str, Gradients],
        microbatch: Microbatch,
        units: Mapping[str, int],
    ) -> tuple[Layer, ...]:
        key = place, microbatch, *(units.get(part.module) for part in chunk.parts)
        if key not in self.known:
            self.known[key] = tuple(
                layer for part in chunk.parts for layer in self._of_part(chunk, part, gradients, microbatch, units)
            )
        return self.known[key]

    def _of_part(
        self,
        chunk: Chunk,
        part: Part,
        gradients: Mapping[str, Gradients],
        microbatch: Microbatch,
        units: Mapping[str, int],
    ) -> list[Layer]:
        if part.module not in gradients:
            return [_SKIPPED] * part.count
        own = gradients[part.module]
        module, slower = on_lane(self.modules[part.module], chunk.share)
        layers = module.layers(microbatch, units[part.module])[part.first : part.end]
        return [
            replace(layer, strategies=tuple(_slowed(strategy, slower) for strategy in layer.strategies))
            if own.any_of(at)
            else replace(layer, strategies=(_KEEPS_NOTHING,))
            for at, layer in enumerate(layers, part.first)
        ]


def _slowed(strategy: Strategy, slower: float) -> Strategy:
    return replace(
        strategy,
        extra_forward_ms=strategy.extra_forward_ms * slower,
        extra_backward_ms=strategy.extra_backward_ms * slower,
    )


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
        method: A name of ``mosaic.pipelining.orders.METHODS``.
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
            if not self.fitting:
                reason = str(shortage) if shortage is not None else self._short(lean)
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
        if isinstance(searched, Searched) and self._holds(searched.timed):  # tasks wait for memory, constants do not
            self.fitting.append((searched.orders, graph, searched.timed, strategies))

    def _short(self, lean: Searched | Deadlock) -> str:
        if isinstance(lean, Deadlock):
            return _stuck(lean)
        over = [
            peak - limit if limit else 0
            for peak, limit in zip(lean.timed.peak_bytes, self.graph.limit_bytes, strict=True)
        ]
        return _lack(over.index(max(over)), max(over), "whatever is recomputed")

    def _holds(self, timed: Timed) -> bool:
        pairs = zip(timed.peak_bytes, self.graph.limit_bytes, strict=True)
        return all(peak <= limit for peak, limit in pairs if limit)


def _stuck(deadlock: Deadlock) -> str:
    short = max(deadlock.short_bytes)
    return _lack(deadlock.short_bytes.index(short), short, f"{deadlock.at_ns / 1e6:.3f} ms into the step")


def _lack(rank: int, short_bytes: int, when: str) -> str:
    return (
        f"rank {rank} is short of {short_bytes} bytes {when}; what would help: a higher limit, smaller microbatches, "
        "or more ranks"
    )


def strategies_of(graph: TaskGraph, pairs: Sequence[Pair], choice: Sequence[int]) -> dict[PairKey, tuple[int, ...]]:
    """Returns the strategy index of each layer, by pair."""
    strategies = {}
    for pair, candidate in zip(pairs, choice, strict=True):
        task = graph.tasks[pair.forward]
        strategies[task.chunk, task.microbatch, task.piece] = pair.candidates[candidate].strategies
    return strategies


AUTO = "auto"
TRIED = ("separated", "mixed-v", "mixed-time", "parallel")
"""Partition methods of ``auto``."""
WEIGHTS = {"with": (False,), "apart": (True,), "either": (False, True)}
"""Values of ``PlannerOptions.weights``: True for backward for weights as a task of its own."""
_TRIAL_SHARE = 0.6
"""Share of the effort for all partitions together; the rest is for the best one again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions:
    """Options of a step's planning.

    Raises:
        ValueError: ``weights`` is unknown.
    """

    partition: str = AUTO
    """A name of ``PARTITION_METHODS``; ``auto``: all of ``TRIED`` that fit the model."""
    weights: str = "with"
    """Backward for weights: ``with`` backward for inputs (as in PipeWeaver), ``apart`` as a task of its own, or
    ``either``, the better of both."""
    method: str = DEFAULT_METHOD
    """A name of ``mosaic.pipelining.orders.METHODS``."""
    limits: OrderLimits = field(default_factory=OrderLimits)
    """Limits of all searches of the step together."""
    candidates: int = 8
    """Most combinations of strategies for each forward with its backward."""

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights={self.weights!r}; use one of {', '.join(WEIGHTS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The plan of one step."""

    partition: Partition
    """Chunks on ranks."""
    graph: TaskGraph
    """Tasks, with the times and bytes of the chosen strategies."""
    orders: Orders
    timed: Timed
    """Its simulation."""
    bound_ns: int
    """Lower bound over all orders and strategies of this partition."""
    strategies: Strategies = "keep"
    """Activation strategies."""
    training: tuple[int, ...] = ()
    """Chunks with gradients to reduce."""
    origin: str = ""
    """Methods of the partition and the order, or a baseline."""

    @property
    def makespan_ns(self) -> int:
        """End of the last task."""
        return self.timed.makespan_ns

    @property
    def gap(self) -> float:
        """Relative distance of the makespan from the bound of this partition."""
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
    contenders: Sequence[Contender] = (),
) -> PlannedStep:
    """Plans one step.

    Args:
        request: Model, ranks, and representative microbatches for the partition.
        microbatches: Microbatches of the step.
        space: The ranks.
        options: Options of the planner.
        partition: A fixed partition; None: made by ``options``.
        contenders: Baselines of the same step; a shorter one with fitting ``weights`` is the result.

    Raises:
        InfeasibleError: No tried plan fits in memory; the message has rank, time, shortage and remedies.
        ValueError: See ``partition_by``, ``task_graph`` and ``search_orders``.
    """
    space, options = space or RankSpace(), options or PlannerOptions()
    job = _Job(request=request, microbatches=tuple(microbatches), space=space, began=time.monotonic())
    runs = [(contender.run, contender.name) for contender in contenders if contender.run is not None]
    plans = [job.as_planned(run, name) for run, name in runs if options.weights != "with" or not run.weights_apart]
    ways = sorted(job.ways(options, partition), key=lambda way: way.natural_ns)
    misfit = None
    best_way: _TriedPartition | None = None  # None if no partition may be shorter than a contender
    share = 1.0 if len(ways) == 1 else _TRIAL_SHARE / len(ways)
    for way in ways:
        if plans and (job.is_over(options.limits) or way.bound_ns >= min(plan.makespan_ns for plan in plans)):
            continue
        try:
            planned = job.plan(way, replace(options, limits=options.limits.share(share)))
        except InfeasibleError as error:
            misfit = misfit or error
            continue
        if all(planned.makespan_ns < plan.makespan_ns for plan in plans):
            best_way = way
        plans.append(planned)
    if not plans:
        assert misfit is not None
        raise misfit
    if len(ways) > 1 and best_way is not None and not job.is_over(options.limits):
        with suppress(InfeasibleError):  # other draws than the first time; earlier plans stay
            plans.append(job.plan(best_way, replace(options, limits=job.left(options.limits))))
    return min(plans, key=lambda planned: planned.makespan_ns)


def plan_baseline(
    name: str, request: Request, microbatches: Sequence[Microbatch], *, space: RankSpace | None = None
) -> PlannedStep:
    """Plans one step by a baseline.

    Raises:
        InfeasibleError: It cannot run the step; has the reason.
        ValueError: The name is unknown.
    """
    space = space or RankSpace()
    (contender,) = contend(request, microbatches, space=space, names=(name,))
    if contender.run is None:
        raise InfeasibleError(f"{name} cannot run this step", reasons=[contender.reason])
    job = _Job(request=request, microbatches=tuple(microbatches), space=space, began=time.monotonic())
    return job.as_planned(contender.run, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TriedPartition:
    """A partition with its tasks."""

    partition: Partition
    name: str
    weights_apart: bool
    graph: TaskGraph
    bound_ns: int
    natural_ns: int
    """Makespan of the natural order without memory limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A step on ranks."""

    request: Request
    microbatches: tuple[Microbatch, ...]
    space: RankSpace
    began: float

    def is_over(self, limits: OrderLimits) -> bool:
        is_late = limits.is_counted_out or time.monotonic() - self.began >= limits.seconds
        return is_late or (limits.should_stop is not None and limits.should_stop())

    def left(self, limits: OrderLimits) -> OrderLimits:
        left_s = max(0.0, limits.seconds - (time.monotonic() - self.began))
        return replace(limits.share(1 - _TRIAL_SHARE), seconds=left_s)

    def ways(self, options: PlannerOptions, fixed: Partition | None) -> list[_TriedPartition]:
        """Returns the partitions to try; without time the first alone.

        Raises:
            ValueError: No partition fits the model.
        """
        names = TRIED if options.partition == AUTO and fixed is None else (options.partition,)
        partitions: list[_TriedPartition] = []
        problem = None
        for name in names:
            try:
                partition = fixed or partition_by(name, self.request)
            except ValueError as error:  # too few layers for it
                problem = problem or error
                continue
            if len(names) > 1 and len({chunk.rank for chunk in partition.chunks}) < self.request.num_ranks:
                continue  # ranks would do nothing
            for weights_apart in WEIGHTS[options.weights]:
                if partitions and self.is_over(options.limits.share(_TRIAL_SHARE)):
                    return partitions
                partitions.append(self._way(partition, "given" if fixed else name, weights_apart=weights_apart))
        if not partitions:
            raise problem or ValueError(f"no partition of {', '.join(names)} uses all ranks; use fewer")
        return partitions

    def _way(self, partition: Partition, name: str, *, weights_apart: bool) -> _TriedPartition:
        graph = self.space.tasks(self.request, partition, self.microbatches, weights_apart=weights_apart)
        free = replace(graph, limit_bytes=())
        rolled = roll_out(free)
        assert not isinstance(rolled, Deadlock)  # without limits nothing waits for memory
        return _TriedPartition(
            partition=partition,
            name=name,
            weights_apart=weights_apart,
            graph=graph,
            bound_ns=bound(free).ns,
            natural_ns=rolled[1].makespan_ns,
        )

    def plan(self, way: _TriedPartition, options: PlannerOptions) -> PlannedStep:
        candidates = Candidates(count=options.candidates, weights_apart=way.weights_apart)
        orders, chosen, timed, strategies = plan_within_memory(
            way.graph, lambda: self._pairs(way, candidates), method=options.method, limits=options.limits
        )
        return PlannedStep(
            partition=way.partition,
            graph=chosen,
            orders=orders,
            timed=timed,
            bound_ns=way.bound_ns,
            strategies=strategies,
            training=training_chunks(self.request.model, way.partition),
            origin=f"{way.name}, {options.method}" + (", weights apart" if way.weights_apart else ""),
        )

    def as_planned(self, run: ContenderRun, name: str) -> PlannedStep:
        return PlannedStep(
            partition=run.partition,
            graph=run.graph,
            orders=run.orders,
            timed=run.timed,
            bound_ns=self._way(run.partition, name, weights_apart=run.weights_apart).bound_ns,
            strategies=run.strategy,
            training=training_chunks(self.request.model, run.partition),
            origin=name,
        )

    def _pairs(self, way: _TriedPartition, candidates: Candidates) -> tuple[Pair, ...]:
        layers = pair_layers(self.request.model, way.partition, self.microbatches)
        return pairs_of(way.graph, lambda task: candidates.of(layers[task.chunk, task.microbatch, task.piece]))


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
    known: dict[Microbatch, float] = {}
    for microbatch in step:
        if microbatch not in known:
            times = layer_times(replace(request, microbatches=(microbatch,)))
            known[microbatch] = math.fsum(time for layers in times.values() for time in layers)
    return share_out([known[microbatch] for microbatch in step], num_replicas)


def plan_shares(
    shares: Shares, step: Sequence[Microbatch], plan: Callable[[Sequence[Microbatch]], PipelineSchedule]
) -> SharedStep:
    """Plans the schedule of each share that is not empty."""
    schedules = (plan([step[at] for at in share]) if share else None for share in shares)
    return SharedStep(shares=shares, schedules=tuple(schedules))
