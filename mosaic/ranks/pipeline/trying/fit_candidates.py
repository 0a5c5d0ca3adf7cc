"""Steps that are run to see how long layers take: modules cut apart, into chunks and pieces of several sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mosaic.pipelining.order.search import OrderLimits
from mosaic.pipelining.replicas import SharedStep
from mosaic.pipelining.tasks import TaskGraph
from mosaic.ranks.pipeline.trying.candidates import Candidates
from mosaic.ranks.pipeline.trying.fitting import FitStep, MeasuredTasks, fit_times, gather_tasks, partition_to_fit
from mosaic.ranks.pipeline.ways import WayRunner

WARM_STEPS = 1
"""Before what layers take is measured."""
FIT_STEPS = 2
"""That it is measured in."""


def fit_candidates(own: Candidates, step: Sequence[Mapping[str, Any]]) -> Candidates:
    """Runs modules cut apart, so that each task is one module's; returns what is planned with how long they took.

    Where that does not fit in memory, or there are fewer layers than ranks, times stay as they were counted.
    """
    runs = [run for run in (_planned_run(own, how) for how in _fit_runs(own)) if run is not None]
    if not runs:
        return own
    shapes = own.shapes(step)
    measured: list[list[MeasuredTasks]] = [[] for _ in runs]
    for at in range(WARM_STEPS + FIT_STEPS):
        for (_, _, shared, runner), found in zip(runs, measured, strict=True):  # in turn: a drift hits all
            with runner.parted.lent_memory():
                ran = runner.run(shared, step, shapes=shapes)
                own.drop_gradients()
            if at >= WARM_STEPS:
                found.append(gather_tasks(ran.times, runner.grid.executor))
    steps = [
        FitStep(graph=graph, measured=found, is_apart=how.weights == "apart")
        for (how, graph, _, _), found in zip(runs, measured, strict=True)
    ]
    names = [module.name for module in own.request.model.modules]
    return own.with_times(own.world.broadcast(fit_times(steps, names) if own.world.rank == 0 else None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FitRun:
    """How modules are cut apart for a step that times are fitted to."""

    weights: str = "with"
    sizes: Mapping[str, int] = field(default_factory=dict)
    is_fine: bool = True


def _fit_runs(own: Candidates) -> list[_FitRun]:
    """Returns chunks of few and of many layers, whole microbatches and halves, backward for weights apart."""
    units = {
        module.name: max(module.units(one) for one in own.request.microbatches) for module in own.request.model.modules
    }
    halves = {name: -(-most // 2) for name, most in units.items() if most > 1}
    runs = [_FitRun(), _FitRun(is_fine=False)]
    runs += [_FitRun(sizes=halves)] * bool(halves)
    return runs + [_FitRun(weights="apart")] * (own.options.weights != "with")


def _planned_run(own: Candidates, how: _FitRun) -> tuple[_FitRun, TaskGraph, SharedStep, WayRunner] | None:
    """Plans the step with modules cut apart, and makes what runs it; None where it cannot run.

    Its tasks are those of the first replica, whose times count, since rank 0 fits.
    """
    partition = partition_to_fit(own.request, how.sizes, is_fine=how.is_fine)
    if {chunk.rank for chunk in partition.chunks} != set(range(partition.num_ranks)):
        return None
    options = replace(own.options, weights=how.weights, limits=OrderLimits(effort=0.0))
    way = replace(own, options=options).given(partition)
    shared = own.plan_sample(way, seconds=0.0)
    if isinstance(shared, str):
        return None
    schedule = shared.schedules[0]
    assert schedule is not None
    graph = way.tasks([way.request.microbatches[at] for at in shared.shares[0]], schedule)
    return how, graph, shared, own.runner(way, keeps_all=True)
