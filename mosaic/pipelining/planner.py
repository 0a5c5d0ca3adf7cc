"""Plan of a step: partition, orders and activation strategies within every rank's memory.

Several partitions are planned in turn; those whose bound is above the best step are skipped, and the remaining effort
is for the best one again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mosaic.errors import InfeasibleError
from mosaic.pipelining.bounds import bound
from mosaic.pipelining.compare import Contender, ContenderRun, contend
from mosaic.pipelining.costs import Strategies
from mosaic.pipelining.order.search import DEFAULT_METHOD, OrderLimits
from mosaic.pipelining.order.simulate import roll_out
from mosaic.pipelining.pair_layers import pair_layers
from mosaic.pipelining.partition.methods import partition_by
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.rank_space import RankSpace
from mosaic.pipelining.schedule.lower import lower
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.pipelining.task_graph import training_chunks
from mosaic.pipelining.tasks import Deadlock, Orders, TaskGraph, Timed
from mosaic.pipelining.tuning import Candidates, Pair, pairs_of
from mosaic.pipelining.within_memory import plan_within_memory
from mosaic.pipelining.workload.microbatch import Microbatch

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
    """A name of ``mosaic.pipelining.order.search.METHODS``."""
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
