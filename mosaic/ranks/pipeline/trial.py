"""Ways tried at the start, in turn, on the sample's step: the fastest stays. Nothing of it trains."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from mosaic.backends.base import Backend
from mosaic.errors import InfeasibleError, InvalidPlanError
from mosaic.parts.random_state import kept_random_state
from mosaic.pipelining.fitted_times import FittedTimes
from mosaic.pipelining.kept_way import KeptWay
from mosaic.pipelining.order.search import OrderLimits
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.planner import AUTO, PlannerOptions
from mosaic.pipelining.rank_space import RankSpace
from mosaic.pipelining.replicas import SharedStep
from mosaic.pipelining.semu.rank_hardware import Degrees
from mosaic.pipelining.tasks import TaskGraph
from mosaic.ranks.meeting.world import World
from mosaic.ranks.pipeline.chunk_work import Loss
from mosaic.ranks.pipeline.context.sequences import Sequences
from mosaic.ranks.pipeline.counting import CountedModel
from mosaic.ranks.pipeline.fitting import FitStep, MeasuredTasks, fit_times, gather_tasks, partition_to_fit
from mosaic.ranks.pipeline.grid.rank_grid import RankGrids
from mosaic.ranks.pipeline.rank_lanes import check_lanes
from mosaic.ranks.pipeline.tensor.slices import WeightSlices
from mosaic.ranks.pipeline.ways import PLANNED, Way, WayRunner

RIVAL = "1f1b"
"""The baseline that the plan has to beat on the same grid; of one rank it is the plain loop."""
COLOCATED = "planned, on lanes"
"""Name of the way that has modules on lanes beside the backbone."""
DATA_PARALLEL = "data parallel"
"""Name of the way that has all layers on every rank."""
WARM_STEPS = 1
"""Before what layers take is measured."""
FIT_STEPS = 2
"""That it is measured in."""
ROUNDS = 3
"""Timed steps of each way."""
SMALLEST_GAIN = 1.02
"""Of the plan over a baseline, below which the baseline, which plans no step anew, is taken."""


@dataclass(frozen=True, kw_only=True)
class PipelineTrial:
    """What a trial found."""

    best: Way
    """The way that stays."""
    step_ms: Mapping[str, float] = field(default_factory=dict)
    """Median step of each way on the slowest rank; empty: nothing was tried."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a way could not be tried."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What a trial needs, on every rank."""

    model: nn.Module
    """With the weights of all layers."""
    counted: CountedModel
    """As planning sees it."""
    request: Request
    """For planning."""
    space: RankSpace
    """For planning."""
    options: PlannerOptions
    """For planning."""
    loss: Loss
    """Of the model's output."""
    degrees: Degrees
    """The grid that is planned for."""
    is_free: bool
    """Whether there may be other numbers of replicas."""
    grids: RankGrids
    """For all ways."""
    slices: WeightSlices | None = None
    """Of weights that tensor ranks share."""
    sequences: Sequences | None = None
    """That context ranks share."""
    backend: Backend | None = None
    """What this rank runs on; None: it has no lanes."""
    partition: Partition | None = None
    """That was given: nothing is tried."""

    @property
    def world(self) -> World:
        """The ranks."""
        return self.grids.world

    def make(
        self,
        name: str,
        *,
        degrees: Degrees | None = None,
        baseline: str = "",
        options: PlannerOptions | None = None,
    ) -> Way | str:
        """Plans a way on rank 0 for all; returns why it cannot be where it cannot."""
        way: Way | str = ""
        if self.world.rank == 0:
            try:
                way = Way.make(
                    name,
                    degrees or self.degrees,
                    self.request,
                    space=self.space,
                    options=options or self.options,
                    baseline=baseline,
                )
                check_lanes(self.model, self.counted.split, way.partition, way.degrees)
            except (InfeasibleError, InvalidPlanError, ValueError) as error:
                way = str(error)
        told: Way | str = self.world.first_says(way)
        return told

    def with_replicas(self, count: int) -> Degrees:
        """Returns the grid of so many replicas."""
        places = self.degrees.data * self.degrees.pipeline
        return replace(self.degrees, data=count, pipeline=places // count)

    def planned(self) -> Way:
        """Plans each step.

        Raises:
            InfeasibleError: Nothing fits, on all ranks.
        """
        way = self.make(PLANNED)
        if isinstance(way, str):
            raise InfeasibleError("the model cannot be planned on these ranks", reasons=[way])
        return way

    def given(self, partition: Partition) -> Way:
        """Plans each step of a partition that was given."""
        return Way(
            name=PLANNED,
            degrees=self.degrees,
            request=self.request,
            space=self.space,
            options=self.options,
            partition=partition,
        )

    def kept(self, kept: KeptWay) -> Way:
        """Returns the way of an earlier start, planned with the times that were measured then."""
        then = self.with_times(kept.fitted)
        return Way(
            name=kept.name,
            baseline=kept.baseline,
            degrees=kept.degrees,
            request=replace(then.request, num_ranks=kept.degrees.pipeline),
            space=then.space,
            options=self.options,
            partition=kept.partition,
        )

    def with_times(self, fitted: FittedTimes) -> Candidates:
        """Returns what is planned with what was measured."""
        request = replace(self.request, model=fitted.model(self.counted.model))
        return replace(self, request=request, space=replace(self.space, host=fitted.host))

    def runner(self, way: Way, *, keeps_all: bool) -> WayRunner:
        """Returns what runs a way."""
        grid = self.grids.of(way.degrees)
        return WayRunner(
            self.model,
            way,
            self.counted,
            self.loss,
            grid=grid,
            slices=self.slices,
            backend=self.backend,
            keeps_all=keeps_all,
        )

    def cut(self, step: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns what the model is called with on this rank for a step's microbatches."""
        return list(step) if self.sequences is None else [self.sequences.cut(one) for one in step]

    def shapes(self, step: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Names the shapes of a step's microbatches."""
        return tuple(self.counted.microbatch(one).key for one in step)


def try_ways(candidates: Candidates, step: Sequence[Mapping[str, Any]]) -> PipelineTrial:
    """Plans, measures one step, plans again with what layers took, and times that plan and baselines in turn.

    Gradients are dropped, and random numbers are as before.

    Raises:
        InfeasibleError: No way fits in memory.
        RankFailedError: Another rank has failed; names it.
    """
    with kept_random_state(candidates.world.device):
        own = fit_candidates(candidates, step)
        made = _made(own)
        ways = {name: way for name, way in made.items() if isinstance(way, Way)}
        planned = {name: _shared(own, way) for name, way in ways.items()}
        shared = {name: found for name, found in planned.items() if isinstance(found, SharedStep)}
        reasons = {name: found for name, found in {**made, **planned}.items() if isinstance(found, str)}
        if not shared:
            raise InfeasibleError("the model cannot run on these ranks", reasons=list(reasons.values()))
        times = _times(own, {name: ways[name] for name in shared}, shared, step)
        own.grids.close()
    best = min(times, key=lambda name: times[name] * (SMALLEST_GAIN if not ways[name].baseline else 1.0))
    return PipelineTrial(best=ways[best], step_ms=times, reasons=reasons)


def _made(own: Candidates) -> dict[str, Way | str]:
    """Returns by name the ways to try, and why others are not tried."""
    made = {PLANNED: own.make(PLANNED), RIVAL: own.make(RIVAL, baseline=RIVAL)}
    if own.options.partition == AUTO and len(own.request.model.modules) > 1:
        made[COLOCATED] = own.make(COLOCATED, options=replace(own.options, partition="colocated"))
    places = own.degrees.data * own.degrees.pipeline
    if not own.is_free or places == 1:
        return made
    made[DATA_PARALLEL] = own.make(DATA_PARALLEL, degrees=own.with_replicas(places), baseline=RIVAL)
    counts = [count for count in range(2, places) if places % count == 0]
    options = replace(own.options, limits=own.options.limits.share(1 / max(1, len(counts))))
    mixed = {}
    for count in counts:
        name = f"{PLANNED}, data={count}"
        mixed[name] = own.make(name, degrees=own.with_replicas(count), options=options)
    best_ms = min((way.predicted_ms for way in made.values() if isinstance(way, Way)), default=math.inf)
    for name, way in sorted(mixed.items(), key=lambda one: getattr(one[1], "predicted_ms", math.inf)):
        if isinstance(way, Way) and way.predicted_ms >= best_ms:
            way = f"predicted {way.predicted_ms:.1f} ms a step, and another way {best_ms:.1f} ms"
        elif isinstance(way, Way):
            best_ms = way.predicted_ms  # of mixed grids the best one is tried
        made[name] = way
    return made


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
                _drop_gradients(own.model)
            if at >= WARM_STEPS:
                found.append(gather_tasks(ran.times, runner.grid.executor))
    steps = [
        FitStep(graph=graph, measured=found, is_apart=how.weights == "apart")
        for (how, graph, _, _), found in zip(runs, measured, strict=True)
    ]
    names = [module.name for module in own.request.model.modules]
    return own.with_times(own.world.first_says(fit_times(steps, names) if own.world.rank == 0 else None))


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
    options = replace(own.options, weights=how.weights, limits=OrderLimits(seconds=0.0))
    way = replace(own, options=options).given(partition)
    shared = _shared(own, way, seconds=0.0)
    if isinstance(shared, str):
        return None
    schedule = shared.schedules[0]
    assert schedule is not None
    graph = way.tasks([way.request.microbatches[at] for at in shared.shares[0]], schedule)
    return how, graph, shared, own.runner(way, keeps_all=True)


def _shared(own: Candidates, way: Way, *, seconds: float | None = None) -> SharedStep | str:
    """Plans the sample's step on rank 0 for all; returns why it cannot be where it cannot."""
    shared: SharedStep | str = ""
    if own.world.rank == 0:
        try:
            shared = way.plan_shared(way.request.microbatches, seconds=seconds)
        except (InfeasibleError, ValueError) as error:
            shared = str(error)
    told: SharedStep | str = own.world.first_says(shared)
    return told


def _times(
    own: Candidates,
    ways: Mapping[str, Way],
    shared: Mapping[str, SharedStep],
    step: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    runners = {name: own.runner(way, keeps_all=True) for name, way in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    shapes = own.shapes(step)
    for at in range(ROUNDS + 1):
        for name, runner in runners.items():
            with runner.parted.lent_memory():
                began = time.perf_counter()
                runner.run(shared[name], step, shapes=shapes)
                took = json.dumps(time.perf_counter() - began)
                _drop_gradients(own.model)
            slowest = max(float(text) for text in runner.grid.transport.tell_all(took))
            if at:  # the first one warms up
                taken[name].append(1e3 * slowest)
    return {name: statistics.median(found) for name, found in taken.items()}


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
