"""Ways tried at the start, in turn, on the sample's step: the fastest stays. Nothing of it trains."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from mosaic.errors import InfeasibleError
from mosaic.find.random_numbers import forked
from mosaic.pipelining.planner import AUTO, PlannerOptions, SharedStep
from mosaic.ranks.pipeline.runner import PLANNED, PipelineRunner, StepPlanner
from mosaic.ranks.pipeline.trying.fitting import fit_lanes, fit_modules
from mosaic.ranks.pipeline.trying.setup import PipelineSetup
from mosaic.take_turns import take_turns

RIVAL = "1f1b"
"""The baseline that the plan has to beat on the same grid; of one rank it is the plain loop."""
COLOCATED = "planned, on lanes"
"""Name of the way that has modules on lanes beside the backbone."""
DATA_PARALLEL = "data parallel"
"""Name of the way that has all layers on every rank."""
ROUNDS = 3
"""Timed steps of each way."""
SMALLEST_GAIN = 1.02
"""Of the plan over a baseline, below which the baseline, which plans no step anew, is taken."""


@dataclass(frozen=True, kw_only=True)
class PipelineTrial:
    """What a trial found."""

    best: StepPlanner
    """The way that stays."""
    step_ms: Mapping[str, float] = field(default_factory=dict)
    """Median step of each way on the slowest rank; empty: nothing was tried."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a way could not be tried."""


def try_plans(candidates: PipelineSetup, step: Sequence[Mapping[str, Any]]) -> PipelineTrial:
    """Plans, measures one step, plans again with what layers took, and times that plan and baselines in turn.

    Gradients are dropped, and random numbers are as before.

    Raises:
        InfeasibleError: No way fits in memory.
        RankFailedError: Another rank has failed; names it.
    """
    with forked(candidates.world.device):
        own = fit_modules(candidates, step)
        lanes = replace(own.options, partition="colocated") if _may_have_lanes(own) else None
        if lanes is not None and isinstance(planner := own.make(COLOCATED, options=lanes), StepPlanner):
            own = fit_lanes(own, planner, step)
        made = _made(own, lanes)
        planners = {name: planner for name, planner in made.items() if isinstance(planner, StepPlanner)}
        planned = {name: own.plan_sample(planner) for name, planner in planners.items()}
        shared = {name: found for name, found in planned.items() if isinstance(found, SharedStep)}
        reasons = {name: found for name, found in {**made, **planned}.items() if isinstance(found, str)}
        if not shared:
            raise InfeasibleError("the model cannot run on these ranks", reasons=list(reasons.values()))
        times = _times(own, {name: planners[name] for name in shared}, shared, step)
        own.grids.close()
    best = min(times, key=lambda name: times[name] * (SMALLEST_GAIN if not planners[name].baseline else 1.0))
    return PipelineTrial(best=planners[best], step_ms=times, reasons=reasons)


def _may_have_lanes(own: PipelineSetup) -> bool:
    return own.options.partition == AUTO and len(own.request.model.modules) > 1


def _made(own: PipelineSetup, lanes: PlannerOptions | None) -> dict[str, StepPlanner | str]:
    """Returns by name the ways to try, with those of ways on lanes, and why others are not tried."""
    made = {PLANNED: own.make(PLANNED), RIVAL: own.make(RIVAL, baseline=RIVAL)}
    if lanes is not None:
        made[COLOCATED] = own.make(COLOCATED, options=lanes)
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
    best_ms = min(
        (planner.predicted_ms for planner in made.values() if isinstance(planner, StepPlanner)), default=math.inf
    )
    for name, planner in sorted(mixed.items(), key=lambda one: getattr(one[1], "predicted_ms", math.inf)):
        if isinstance(planner, StepPlanner) and planner.predicted_ms >= best_ms:
            planner = f"predicted {planner.predicted_ms:.1f} ms a step, and another way {best_ms:.1f} ms"
        elif isinstance(planner, StepPlanner):
            best_ms = planner.predicted_ms  # of mixed grids the best one is tried
        made[name] = planner
    return made


def _times(
    own: PipelineSetup,
    planners: Mapping[str, StepPlanner],
    shared: Mapping[str, SharedStep],
    step: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """Returns the median step of each way on the slowest rank, in milliseconds."""
    shapes = own.shapes(step)

    def timed(name: str, runner: PipelineRunner) -> list[float]:
        with runner.parted.lent_memory():
            began = time.perf_counter()
            runner.run(shared[name], step, shapes=shapes)
            took = json.dumps(time.perf_counter() - began)
            own.drop_gradients()
        return [1e3 * max(float(text) for text in runner.grid.transport.tell_all(took))]

    runs = {name: partial(timed, name, own.runner(planner, keeps_all=True)) for name, planner in planners.items()}
    take_turns(runs, 1)  # each warms up
    return {name: statistics.median(chain(*rounds)) for name, rounds in take_turns(runs, ROUNDS).items()}
