"""The trial at the start: counted times are scaled by one measured step, then plans take turns and the fastest stays.

Nothing of it trains. Times are those of the host: on a GPU those of launches, which say little.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise

from mosaic.errors import InfeasibleError
from mosaic.find.random_numbers import forked
from mosaic.find.restore import restored_objects
from mosaic.graph import Part
from mosaic.pipelining.layers import ModuleFit
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.partition import Chunk, Partition, Request
from mosaic.pipelining.plan import StepPlanner
from mosaic.pipelining.planner import AUTO, SharedStep
from mosaic.pipelining.schedule import TaskName
from mosaic.pipelining.tasks import ActionKind, TaskGraph
from mosaic.ranks.pipeline.chunk_work import Microbatches
from mosaic.ranks.pipeline.executor import Span
from mosaic.ranks.pipeline.setup import PLANNED, PipelineSetup
from mosaic.ranks.pipeline.step import PipelineRunner
from mosaic.ranks.pipeline.transport import Transport
from mosaic.take_turns import take_turns

RIVAL = "1f1b"
"""The baseline that the plan has to beat on the same grid; on one rank it is the plain loop."""
COLOCATED = "planned, on lanes"
"""Name of the plan that has modules on lanes beside the backbone."""
DATA_PARALLEL = "data parallel"
"""Name of the plan that has all layers on every rank."""
ROUNDS = 3
SMALLEST_GAIN = 1.02
"""Smallest gain of the plan over a baseline; below it the baseline is taken, which plans no step anew."""


@dataclass(frozen=True, kw_only=True)
class PipelineTrial:
    best: StepPlanner
    step_ms: Mapping[str, float] = field(default_factory=dict)
    """Median step of each plan on the slowest rank; empty without a trial."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reasons why plans were not tried."""


def try_plans(setup: PipelineSetup, step: Microbatches) -> PipelineTrial:
    """Scales counted times by one measured step, plans, and times plans and baselines in turn.

    Gradients are dropped, and random numbers are as before.

    Raises:
        InfeasibleError: No plan fits in memory.
        RankFailedError: Another rank has failed; names it.
    """
    with forked(setup.world.device), restored_objects(setup.model):
        setup = fit_modules(setup, step)
        candidates = _candidates(setup)
        planners = {name: planner for name, planner in candidates.items() if isinstance(planner, StepPlanner)}
        planned = {name: setup.plan_sample(planner) for name, planner in planners.items()}
        shared = {name: step for name, step in planned.items() if isinstance(step, SharedStep)}
        reasons = {name: reason for name, reason in {**candidates, **planned}.items() if isinstance(reason, str)}
        if not shared:
            raise InfeasibleError("the model cannot run on these ranks", reasons=list(reasons.values()))
        times = _times(setup, {name: planners[name] for name in shared}, shared, step)
        setup.grids.close()
    best = min(times, key=lambda name: times[name] * (SMALLEST_GAIN if not planners[name].plan.baseline else 1.0))
    return PipelineTrial(best=planners[best], step_ms=times, reasons=reasons)


def _candidates(setup: PipelineSetup) -> dict[str, StepPlanner | str]:
    """Returns the plans to try by name, and why others are not tried."""
    plans = {PLANNED: setup.make(PLANNED), RIVAL: setup.make(RIVAL, baseline=RIVAL)}
    if setup.options.partition == AUTO and len(setup.request.model.modules) > 1:
        plans[COLOCATED] = setup.make(COLOCATED, options=replace(setup.options, partition="colocated"))
    places = setup.degrees.data * setup.degrees.pipeline
    if not setup.is_free or places == 1:
        return plans
    plans[DATA_PARALLEL] = setup.make(DATA_PARALLEL, degrees=setup.with_replicas(places), baseline=RIVAL)
    counts = [count for count in range(2, places) if places % count == 0]
    options = replace(setup.options, limits=setup.options.limits.share(1 / max(1, len(counts))))
    mixed = {}
    for count in counts:
        name = f"{PLANNED}, data={count}"
        mixed[name] = setup.make(name, degrees=setup.with_replicas(count), options=options)
    best_ms = min(map(_predicted_ms, plans.values()))
    for name, planner in sorted(mixed.items(), key=lambda item: _predicted_ms(item[1])):
        predicted_ms = _predicted_ms(planner)
        if not isinstance(planner, str) and predicted_ms >= best_ms:
            planner = f"predicted {predicted_ms:.1f} ms a step, and another plan {best_ms:.1f} ms"
        best_ms = min(best_ms, predicted_ms)  # of mixed grids the best one is tried
        plans[name] = planner
    return plans


def _predicted_ms(planner: StepPlanner | str) -> float:
    return math.inf if isinstance(planner, str) else planner.plan.predicted_ms


def _times(
    setup: PipelineSetup,
    planners: Mapping[str, StepPlanner],
    shared: Mapping[str, SharedStep],
    step: Microbatches,
) -> dict[str, float]:
    """Returns the median step of each plan on the slowest rank, in milliseconds."""
    counted = setup.count(step)

    def timed(name: str, runner: PipelineRunner) -> list[float]:
        with runner.parted.lent_memory():
            began = time.perf_counter()
            runner.run(shared[name], step, counted=counted)
            took_ms = 1e3 * (time.perf_counter() - began)
            setup.model.zero_grad()
        return [max(runner.grid.transport.all_gather(took_ms))]

    runs = {
        name: partial(timed, name, PipelineRunner(setup, planner.plan, keeps_all=True))
        for name, planner in planners.items()
    }
    take_turns(runs, range(1))  # each warms up
    return {name: statistics.median(chain(*rounds)) for name, rounds in take_turns(runs, range(ROUNDS)).items()}


ActionSpans = Mapping[str, tuple[int, int]]
"""Start and end of actions, on the clock of their machine, in nanoseconds."""


def gather_spans(spans: Sequence[Span], transport: Transport) -> ActionSpans:
    """Gathers the spans of this rank's pipeline; all ranks call it. Clocks of machines are not aligned."""
    gathered = transport.all_gather({cell: (start, end) for cell, start, end in spans})
    return {cell: span for rank in transport.line for cell, span in gathered[rank].items()}


def fit_modules(setup: PipelineSetup, step: Microbatches) -> PipelineSetup:
    """Runs one step whose tasks are of one module each; returns the setup with a measured scale for each module.

    Where that step does not fit in memory, or there are fewer layers than ranks, times stay as they were counted.
    """
    partition = partition_to_fit(setup.request)
    if {chunk.rank for chunk in partition.chunks} != set(range(partition.num_ranks)):
        return setup
    planner = replace(setup, options=replace(setup.options, limits=OrderLimits(effort=0.0))).planner_of(partition)
    shared = setup.plan_sample(planner, seconds=0.0)
    if isinstance(shared, str) or (schedule := shared.schedules[0]) is None:
        return setup
    runner, counted = PipelineRunner(setup, planner.plan, keeps_all=True), setup.count(step)
    for _ in range(2):  # the first one warms up
        with runner.parted.lent_memory():
            _, spans = runner.run(shared, step, counted=counted)
            setup.model.zero_grad()
    measured = gather_spans(spans, runner.grid.transport)
    fitted = None
    if setup.world.rank == 0:
        graph = planner.tasks([planner.request.microbatches[at] for at in shared.shares[0]], schedule)
        fitted = fit_times(graph, measured, [module.name for module in setup.request.model.modules])
    return setup.with_times(setup.world.broadcast(fitted))


def partition_to_fit(request: Request) -> Partition:
    """Returns a partition in which each module passes over the ranks once, in even chunks of its own."""
    ranks, chunks = request.num_ranks, []
    for module in request.model.modules:
        count = len(module.trains)
        bounds = [rank * count // ranks for rank in range(ranks + 1)]
        for rank, (first, end) in enumerate(pairwise(bounds)):
            if first < end:
                part = Part(module=module.name, first=first, count=end - first, total=count)
                chunks.append(Chunk(parts=(part,), rank=rank))
    return Partition(num_ranks=ranks, chunks=tuple(chunks))


def fit_times(graph: TaskGraph, spans: ActionSpans, names: Sequence[str]) -> dict[str, ModuleFit]:
    """Returns measured over counted time of each module's forwards and backwards."""
    counted: Counter[tuple[str, ActionKind]] = Counter()
    taken: Counter[tuple[str, ActionKind]] = Counter()
    for task in graph.tasks:
        start_ns, end_ns = spans[str(TaskName.of(task))]
        for module in (task.parts[0].module, ""):
            counted[module, task.kind] += task.time_ns
            taken[module, task.kind] += end_ns - start_ns

    def fit(name: str, kind: ActionKind) -> float:
        module = name if counted[name, kind] else ""
        return taken[module, kind] / counted[module, kind] if counted[module, kind] else 1.0

    return {
        name: ModuleFit(forward=fit(name, ActionKind.FORWARD), backward=fit(name, ActionKind.BACKWARD))
        for name in names
    }
