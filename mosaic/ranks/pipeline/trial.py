"""Ways tried at the start, in turn, on the sample's step: the fastest stays. Nothing of it trains."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from mosaic.errors import InfeasibleError
from mosaic.parts.random_state import kept_random_state
from mosaic.pipelining.order.search import OrderLimits
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.planner import PlannerOptions
from mosaic.pipelining.rank_space import RankSpace
from mosaic.ranks.meeting.world import World
from mosaic.ranks.pipeline.chunk_work import Loss
from mosaic.ranks.pipeline.counting import CountedModel
from mosaic.ranks.pipeline.executing.executor import Executor
from mosaic.ranks.pipeline.fitting import fit_times, gather_tasks
from mosaic.ranks.pipeline.ways import PLANNED, GroupsOfRanks, Way, WayRunner, shapes_of

RIVALS = ("1f1b",)
"""Baselines that the plan has to beat."""
WARM_STEPS = 2
"""Before what layers take is measured."""
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
    world: World
    """The ranks."""
    executor: Executor
    """For all ways."""
    groups: GroupsOfRanks
    """For all ways."""

    def make(self, name: str, options: PlannerOptions | None = None) -> Way | str:
        """Plans a way on rank 0 for all; returns why it cannot be where it cannot."""
        way: Way | str = ""
        if self.world.rank == 0:
            try:
                way = Way.make(name, self.request, self.space, options or self.options)
            except (InfeasibleError, ValueError) as error:
                way = str(error)
        told: Way | str = self.world.first_says(way)
        return told

    def planned(self) -> Way:
        """Plans each step.

        Raises:
            InfeasibleError: Nothing fits, on all ranks.
        """
        way = self.make(PLANNED)
        if isinstance(way, str):
            raise InfeasibleError("the model cannot be planned on these ranks", reasons=[way])
        return way

    def runner(self, way: Way, *, keeps_all: bool) -> WayRunner:
        """Returns what runs a way."""
        return WayRunner(
            self.model, way, self.counted, self.loss, executor=self.executor, groups=self.groups, keeps_all=keeps_all
        )

    def shapes(self, step: Sequence[Mapping[str, Any]]) -> str:
        """Names the shapes of a step."""
        return shapes_of([self.counted.microbatch(one) for one in step])


def try_ways(candidates: Candidates, step: Sequence[Mapping[str, Any]]) -> PipelineTrial:
    """Plans, measures one step, plans again with what layers took, and times that plan and baselines in turn.

    Gradients are dropped, and random numbers are as before.

    Raises:
        InfeasibleError: Nothing that is planned fits in memory.
        RankFailedError: Another rank has failed; names it.
    """
    with kept_random_state(candidates.world.device):
        own = fit_candidates(candidates, step)
        made = {PLANNED: own.planned(), **{name: own.make(name) for name in RIVALS}}
        ways = {name: way for name, way in made.items() if isinstance(way, Way)}
        reasons = {name: way for name, way in made.items() if isinstance(way, str)}
        times = _times(own, ways, step)
    best = min(times, key=lambda name: times[name] * (SMALLEST_GAIN if name == PLANNED else 1.0))
    return PipelineTrial(best=ways[best], step_ms=times, reasons=reasons)


def fit_candidates(own: Candidates, step: Sequence[Mapping[str, Any]]) -> Candidates:
    """Runs modules cut apart, so that each task is one module's; returns what is planned with how long they took."""
    apart = replace(own.options, partition="separated", weights="with", limits=OrderLimits(seconds=0.0))
    way = own.make(PLANNED, apart)
    if isinstance(way, str):
        way = own.planned()
    runner = own.runner(way, keeps_all=True)
    schedule, planned = _planned(own, way)
    for _ in range(WARM_STEPS + 1):
        ran = runner.run(schedule, step, shapes=own.shapes(step))
    measured = gather_tasks(ran.times, own.executor)
    _drop_gradients(own.model)
    names = [module.name for module in own.request.model.modules]
    whole_ns = _whole_forwards_ns(own, step)
    fitted = None if planned is None else fit_times(planned, measured, names, whole_forwards_ns=whole_ns)
    fitted = own.world.first_says(fitted)
    assert fitted is not None
    return replace(
        own,
        request=replace(own.request, model=own.counted.scaled(fitted.scales)),
        space=replace(own.space, task_ns=fitted.task_ns),
    )


def _whole_forwards_ns(own: Candidates, step: Sequence[Mapping[str, Any]]) -> int:
    """Returns what the uncut model's forwards of a step take, while all ranks run them."""
    own.executor.transport.tell("forwards")
    began = time.perf_counter_ns()
    for microbatch in step:
        own.model(**microbatch)
    return time.perf_counter_ns() - began


def _planned(own: Candidates, way: Way) -> tuple[Any, Any]:
    planned = way.plan(way.request.microbatches) if own.world.rank == 0 else None
    schedule = own.world.first_says(None if planned is None else planned.schedule())
    return schedule, planned


def _times(own: Candidates, ways: Mapping[str, Way], step: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    runners = {name: own.runner(way, keeps_all=True) for name, way in ways.items()}
    schedules = {name: _planned(own, way)[0] for name, way in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    shapes = own.shapes(step)
    for at in range(ROUNDS + 1):
        for name, runner in runners.items():
            began = time.perf_counter()
            runner.run(schedules[name], step, shapes=shapes)
            slowest = max(float(text) for text in own.executor.transport.tell(json.dumps(time.perf_counter() - began)))
            if at:  # the first one warms up
                taken[name].append(1e3 * slowest)
            _drop_gradients(own.model)
    return {name: statistics.median(found) for name, found in taken.items()}


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
