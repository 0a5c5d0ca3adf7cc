"""A step, planned: cut, ordered, and with what becomes of activations, so that every rank's memory holds.

Several ways to cut the model are planned in turn; those whose bound is above the best step are left out, and what
effort is left is for the best one again.
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
from mosaic.pipelining.tuning.candidates import Candidates
from mosaic.pipelining.tuning.pairs import Pair, pairs_of
from mosaic.pipelining.within_memory import plan_within_memory
from mosaic.pipelining.workload.microbatch import Microbatch

AUTO = "auto"
TRIED = ("separated", "mixed-v", "mixed-time", "parallel")
"""Ways to cut a model that are tried where none is asked for."""
WEIGHTS = {"with": (False,), "apart": (True,), "either": (False, True)}
"""Ways to treat backward for weights: for each whether it is a task of its own."""
_TRIAL_SHARE = 0.6
"""Of the effort, for all ways together; the rest is for the best one again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions:
    """How a step is planned.

    Raises:
        ValueError: ``weights`` is not known.
    """

    partition: str = AUTO
    """A name of ``PARTITION_METHODS``; ``auto``: all of ``TRIED`` that fit the model."""
    weights: str = "with"
    """Whether backward for weights is a task of its own: ``with`` backward for inputs (as PipeWeaver has it),
    ``apart``, or ``either``: both are tried."""
    method: str = DEFAULT_METHOD
    """A name of ``mosaic.pipelining.order.search.METHODS``."""
    limits: OrderLimits = field(default_factory=OrderLimits)
    """Of all searches of the step together."""
    candidates: int = 8
    """Combinations of strategies for each forward with its backward, at most."""

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights={self.weights!r}; use one of {', '.join(WEIGHTS)}")


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
    origin: str = ""
    """How it was found: a partition and an order, or a baseline."""

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
    contenders: Sequence[Contender] = (),
) -> PlannedStep:
    """Plans one step.

    Args:
        request: Model, ranks, and the microbatches that its partition is made for.
        microbatches: The step's.
        space: What ranks are.
        options: How to plan.
        partition: Where layers are already; None: it is made, as options say.
        contenders: Of the same step; one that is shorter than what was found is taken, if it has weights as asked for.

    Raises:
        InfeasibleError: Nothing that was tried fits in memory; says which rank, when, by how much, and what helps.
        ValueError: See ``partition_by``, ``task_graph`` and ``search_orders``.
    """
    space, options = space or RankSpace(), options or PlannerOptions()
    job = _Job(request=request, microbatches=tuple(microbatches), space=space, began=time.monotonic())
    runs = [(one.run, one.name) for one in contenders if one.run is not None]
    found = [job.as_planned(run, name) for run, name in runs if options.weights != "with" or not run.weights_apart]
    ways = sorted(job.ways(options, partition), key=lambda way: way.natural_ns)
    misfit = None
    best_way: _Way | None = None  # none where no way is planned that could be shorter than a contender
    share = 1.0 if len(ways) == 1 else _TRIAL_SHARE / len(ways)
    for way in ways:
        if found and (job.is_over(options.limits) or way.bound_ns >= min(one.makespan_ns for one in found)):
            continue
        try:
            planned = job.plan(way, replace(options, limits=options.limits.share(share)))
        except InfeasibleError as error:
            misfit = misfit or error
            continue
        if all(planned.makespan_ns < one.makespan_ns for one in found):
            best_way = way
        found.append(planned)
    if not found:
        assert misfit is not None
        raise misfit
    if len(ways) > 1 and best_way is not None and not job.is_over(options.limits):
        with suppress(InfeasibleError):  # other draws than the first time; what was found then stays
            found.append(job.plan(best_way, replace(options, limits=job.left(options.limits))))
    return min(found, key=lambda planned: planned.makespan_ns)


def plan_baseline(
    name: str, request: Request, microbatches: Sequence[Microbatch], *, space: RankSpace | None = None
) -> PlannedStep:
    """Plans one step as a baseline of that name does.

    Raises:
        InfeasibleError: It cannot run the step; says why.
        ValueError: There is none of that name.
    """
    space = space or RankSpace()
    (found,) = contend(request, microbatches, space=space, names=(name,))
    if found.run is None:
        raise InfeasibleError(f"{name} cannot run this step", reasons=[found.reason])
    job = _Job(request=request, microbatches=tuple(microbatches), space=space, began=time.monotonic())
    return job.as_planned(found.run, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to cut the model, and the tasks that come of it."""

    partition: Partition
    name: str
    weights_apart: bool
    graph: TaskGraph
    bound_ns: int
    natural_ns: int
    """What groups take as they come, memory apart."""


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

    def ways(self, options: PlannerOptions, given: Partition | None) -> list[_Way]:
        """All ways to look at; where time is short the first one alone.

        Raises:
            ValueError: None fits the model.
        """
        names = TRIED if options.partition == AUTO and given is None else (options.partition,)
        found: list[_Way] = []
        problem = None
        for name in names:
            try:
                partition = given or partition_by(name, self.request)
            except ValueError as error:  # too few layers for it
                problem = problem or error
                continue
            if len(names) > 1 and len({chunk.rank for chunk in partition.chunks}) < self.request.num_ranks:
                continue  # ranks would do nothing
            for weights_apart in WEIGHTS[options.weights]:
                if found and self.is_over(options.limits.share(_TRIAL_SHARE)):
                    return found
                found.append(self._way(partition, "given" if given else name, weights_apart=weights_apart))
        if not found:
            raise problem or ValueError(f"no partition of {', '.join(names)} uses all ranks; use fewer")
        return found

    def _way(self, partition: Partition, name: str, *, weights_apart: bool) -> _Way:
        graph = self.space.tasks(self.request, partition, self.microbatches, weights_apart=weights_apart)
        free = replace(graph, limit_bytes=())
        rolled = roll_out(free)
        assert not isinstance(rolled, Deadlock)  # without limits nothing waits for memory
        return _Way(
            partition=partition,
            name=name,
            weights_apart=weights_apart,
            graph=graph,
            bound_ns=bound(free).ns,
            natural_ns=rolled[1].makespan_ns,
        )

    def plan(self, way: _Way, options: PlannerOptions) -> PlannedStep:
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

    def _pairs(self, way: _Way, candidates: Candidates) -> tuple[Pair, ...]:
        layers = pair_layers(self.request.model, way.partition, self.microbatches)
        return pairs_of(way.graph, lambda task: candidates.of(layers[task.chunk, task.microbatch, task.piece]))
