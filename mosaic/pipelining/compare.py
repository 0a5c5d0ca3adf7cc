"""Other ways to run the same step, each at its best, on the same ranks and by the same simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.pipelining.baselines.methods import BASELINES, draw_baseline
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.order.simulate import simulate
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.rank_space import RankSpace
from mosaic.pipelining.tasks import Orders, TaskGraph, Timed
from mosaic.pipelining.workload.microbatch import Microbatch

STRATEGIES = ("keep", "recompute")
"""Of all layers, in the order in which a baseline tries them until its memory holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderRun:
    """How a baseline runs a step."""

    partition: Partition
    """Chunks on ranks."""
    graph: TaskGraph
    """Its tasks."""
    orders: Orders
    """The fastest of its orders."""
    timed: Timed
    """Its simulation."""
    strategy: str
    """What becomes of activations."""

    @property
    def weights_apart(self) -> bool:
        """Whether backward for weights is a task of its own."""
        return any(task.kind is ActionKind.WEIGHTS for task in self.graph.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """What a baseline makes of a step."""

    name: str
    """Of ``BASELINES``."""
    run: ContenderRun | None = None
    """None where it cannot run the step."""
    reason: str = ""
    """Why it cannot; empty where it can."""

    @property
    def makespan_ns(self) -> int | None:
        """When the last task ends; None where it cannot run."""
        return None if self.run is None else self.run.timed.makespan_ns


def bubble_share(graph: TaskGraph, timed: Timed) -> float:
    """Returns the share of all ranks' time in which nothing runs on them, lanes averaged."""
    work = sum(task.time_ns for task in graph.tasks)
    return 1 - work / (timed.makespan_ns * graph.num_rows) if timed.makespan_ns else 0.0


def contend(
    request: Request,
    microbatches: Sequence[Microbatch],
    *,
    space: RankSpace | None = None,
    names: Sequence[str] = tuple(BASELINES),
    strategies: Sequence[str] = STRATEGIES,
) -> tuple[Contender, ...]:
    """Returns each baseline's fastest step that fits, in the order of ``names``.

    Raises:
        ValueError: A name is none of ``BASELINES``.
    """
    if unknown := [name for name in names if name not in BASELINES]:
        raise ValueError(f"baseline={unknown[0]!r} is none; use some of {', '.join(BASELINES)}")
    return tuple(_contender(name, request, microbatches, space or RankSpace(), strategies) for name in names)


def _contender(
    name: str, request: Request, microbatches: Sequence[Microbatch], space: RankSpace, strategies: Sequence[str]
) -> Contender:
    for strategy in strategies:

        def build(partition: Partition, weights_apart: bool, strategy: str = strategy) -> TaskGraph:
            return space.tasks(request, partition, microbatches, strategies=strategy, weights_apart=weights_apart)

        try:
            drawn = draw_baseline(name, request, microbatches, build=build)
        except ValueError as error:
            return Contender(name=name, reason=str(error))
        played = [(orders, simulate(drawn.graph, orders)) for orders in drawn.candidates]
        fits = [(orders, timed) for orders, timed in played if isinstance(timed, Timed)]
        if fits:
            orders, timed = min(fits, key=lambda one: one[1].makespan_ns)
            run = ContenderRun(
                partition=drawn.partition, graph=drawn.graph, orders=orders, timed=timed, strategy=strategy
            )
            return Contender(name=name, run=run)
    return Contender(name=name, reason=f"its memory does not hold with {' or '.join(strategies)}")
