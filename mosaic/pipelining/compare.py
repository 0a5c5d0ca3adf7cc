"""Baselines of the same step, each at its best, on the same ranks and by the same simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mosaic.errors import unknown
from mosaic.pipelining.baselines import BASELINES, Baseline, draw_baseline
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.order.simulate import simulate
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.rank_space import RankSpace
from mosaic.pipelining.tasks import Orders, TaskGraph, Timed
from mosaic.pipelining.workload.microbatch import Microbatch

STRATEGIES = ("keep", "recompute")
"""Strategies of all layers, in the order in which a baseline tries them until its memory holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderRun:
    """A baseline's run of a step."""

    partition: Partition
    """Chunks on ranks."""
    graph: TaskGraph
    """Its tasks."""
    orders: Orders
    """The fastest of its orders."""
    timed: Timed
    """Its simulation."""
    strategy: str
    """Activation strategy of all layers."""

    @property
    def weights_apart(self) -> bool:
        """True if backward for weights is a task of its own."""
        return any(task.kind is ActionKind.WEIGHTS for task in self.graph.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A baseline's result for a step."""

    name: str
    """Name in ``BASELINES``."""
    run: ContenderRun | None = None
    """None if it cannot run the step."""
    reason: str = ""
    """Reason why it cannot; otherwise empty."""

    @property
    def makespan_ns(self) -> int | None:
        """End of the last task; None if it cannot run."""
        return None if self.run is None else self.run.timed.makespan_ns


def bubble_share(graph: TaskGraph, timed: Timed) -> float:
    """Returns the idle share of all ranks' time, averaged over lanes."""
    work = sum(task.time_ns for task in graph.tasks)
    return 1 - work / (timed.makespan_ns * graph.num_rows) if timed.makespan_ns else 0.0


def contend(
    request: Request,
    microbatches: Sequence[Microbatch],
    *,
    space: RankSpace | None = None,
    names: Sequence[str] = tuple(BASELINES),
    strategies: Sequence[str] = STRATEGIES,
    table: Mapping[str, Baseline] = BASELINES,
) -> tuple[Contender, ...]:
    """Returns each baseline's fastest step that fits, in the order of ``names``.

    Raises:
        ValueError: A name is not in ``table``.
    """
    for name in names:
        if name not in table:
            raise ValueError(unknown("baseline", name, table))
    space = space or RankSpace()
    return tuple(_contender(table[name], request, microbatches, space, strategies) for name in names)


def _contender(
    baseline: Baseline,
    request: Request,
    microbatches: Sequence[Microbatch],
    space: RankSpace,
    strategies: Sequence[str],
) -> Contender:
    for strategy in strategies:

        def build(partition: Partition, weights_apart: bool, strategy: str = strategy) -> TaskGraph:
            return space.tasks(request, partition, microbatches, strategies=strategy, weights_apart=weights_apart)

        try:
            drawn = draw_baseline(baseline, request, microbatches, build=build)
        except ValueError as error:
            return Contender(name=baseline.name, reason=str(error))
        played = [(orders, simulate(drawn.graph, orders)) for orders in drawn.candidates]
        fits = [(orders, timed) for orders, timed in played if isinstance(timed, Timed)]
        if fits:
            orders, timed = min(fits, key=lambda fit: fit[1].makespan_ns)
            run = ContenderRun(
                partition=drawn.partition, graph=drawn.graph, orders=orders, timed=timed, strategy=strategy
            )
            return Contender(name=baseline.name, run=run)
    return Contender(name=baseline.name, reason=f"its memory does not hold with {' or '.join(strategies)}")
