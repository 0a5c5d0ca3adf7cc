"""Steps of a model by our plan and by baselines on the same executor, in turn.

Counted times are fitted to one step, which also stands for all when layers are put on ranks; other steps are planned,
simulated and run. Simulated is what tasks take, from the first one's start to the last one's end.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.pipeline.measured.judged import JudgedStep, judge, slowest_ms, take
from bench.pipeline.measured.models import MODELS, MeasuredModel
from bench.record import Figure, median_figure, missing_figure
from mosaic.engine.options import RankSettings
from mosaic.pipelining.plan import StepPlanner
from mosaic.ranks.pipeline.setup import PLANNED, PipelineOptions, PipelineSetup, make_setup
from mosaic.ranks.pipeline.trial import fit_modules
from mosaic.ranks.world.world import World

RIVALS = ("1f1b", "megatron", "gpipe")
"""Baselines, as ``BASELINES`` has them: 1F1B on the mixed partition, interleaved, and all forwards first."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The extent of a study."""

    width: int = 256
    """Of the models."""
    layers: int = 8
    """Of each of their modules."""
    microbatches: int = 8
    """Of a step."""
    steps: int = 3
    """That are judged."""
    rounds: int = 5
    """Of each step, beside one that warms up."""
    plan_s: float = 1.0
    """For each step."""


def fitted(model: MeasuredModel, sizes: Sizes) -> PipelineSetup:
    """Returns the model on these ranks, counted, with times fitted to its first step."""
    world = World.join(torch.device("cpu"), watch=RankSettings())
    whole, step = model.model(sizes.width, sizes.layers), model.step(0, sizes.microbatches)
    return fit_modules(make_setup(whole, step, world, PipelineOptions(data=1)), step)


def ways_of(own: PipelineSetup) -> dict[str, StepPlanner | str]:
    """Returns each way, or why there is none."""
    return {PLANNED: own.make(PLANNED), **{name: own.make(name, baseline=name) for name in RIVALS}}


def steps(rank: int, size: int, *, name: str, sizes: Sizes) -> Iterator[Figure]:
    """All ways in turn; a figure for each, and for each baseline over the plan."""
    model = MODELS[name]
    began = time.perf_counter()
    own = fitted(model, sizes)
    fit_s = slowest_ms(own, began) / 1e3
    made = ways_of(own)
    planners = {planner: found for planner, found in made.items() if isinstance(found, StepPlanner)}
    of = f"{name}, {size} ranks"
    if PLANNED not in planners:
        yield missing_figure(f"{of}: all of it", made[PLANNED])
        return
    turns = _Turns(own, model, sizes, planners)
    turns.take()
    yield Figure(name=f"{of}: counted and fitted, s", source="measured", value=fit_s)
    yield from _times(of, turns, made)
    yield from _errors(of, turns.judged)


class _Turns:
    """Steps of all ways, one after the other in each round."""

    def __init__(
        self, own: PipelineSetup, model: MeasuredModel, sizes: Sizes, planners: dict[str, StepPlanner]
    ) -> None:
        self.own, self.model, self.sizes, self.planners = own, model, sizes, planners
        self.judged: dict[str, list[JudgedStep]] = {planner: [] for planner in planners}
        self._runners = {planner: own.runner(found.plan, keeps_all=True) for planner, found in planners.items()}

    def take(self) -> None:
        """Takes all steps."""
        for seed in range(1, 1 + self.sizes.steps):
            step = self.model.step(seed, self.sizes.microbatches)
            for planner, found in self.planners.items():
                self.judged[planner].append(judge(self.own, found, step, seconds=self.sizes.plan_s))
            for _ in range(1 + self.sizes.rounds):
                losses = {
                    planner: torch.tensor(take(self.own, runner, self.judged[planner][-1], step))
                    for planner, runner in self._runners.items()
                }
                for planner, own in losses.items():
                    torch.testing.assert_close(
                        own, losses[PLANNED], rtol=1e-4, atol=1e-5, msg=f"{planner}: other losses"
                    )


def _times(of: str, turns: _Turns, made: dict[str, StepPlanner | str]) -> Iterator[Figure]:
    ours = [judged.step_ms[1:] for judged in turns.judged[PLANNED]]
    yield _median(f"{of}: planned: step, ms", ours)
    beside = [
        whole - tasks
        for judged in turns.judged[PLANNED]
        for whole, tasks in zip(judged.step_ms[1:], judged.tasks_ms[1:], strict=True)
    ]
    yield median_figure(f"{of}: planned: of it beside tasks, ms", beside, labels={"samples": str(len(beside))})
    for name in RIVALS:
        ratio, reason = f"{of}: {name}: step over the planned one's, ratio", made[name]
        if isinstance(reason, str):
            yield from (missing_figure(text, reason) for text in (f"{of}: {name}: step, ms", ratio))
            continue
        theirs = [one.step_ms for one in turns.judged[name]]
        timed = [each[1:] for each in theirs]
        yield _median(f"{of}: {name}: step, ms", timed)
        yield _median(ratio, [[b / a for a, b in zip(*pair, strict=True)] for pair in zip(ours, timed, strict=True)])


def _median(name: str, by_step: Sequence[Sequence[float]]) -> Figure:
    """Returns the median over rounds of all steps."""
    samples = [one for each in by_step for one in each]
    return median_figure(name, samples, labels={"samples": str(len(samples)), "steps": str(len(by_step))})


def _errors(of: str, by_way: dict[str, list[JudgedStep]]) -> Iterator[Figure]:
    """Yields errors of simulated steps against measured ones, none of which was fitted to."""
    errors = []
    for planner, judged in by_way.items():
        measured = [statistics.median(one.tasks_ms[1:]) for one in judged]
        own = [100 * (one.simulated_ms / taken - 1) for one, taken in zip(judged, measured, strict=True)]
        errors += own
        yield Figure(
            name=f"{of}: {planner}: tasks of a step, ms",
            source="simulated",
            value=statistics.median(one.simulated_ms for one in judged),
            samples=tuple(one.simulated_ms for one in judged),
        )
        yield _median(f"{of}: {planner}: tasks of a step, ms", [one.tasks_ms[1:] for one in judged])
        yield Figure(
            name=f"{of}: {planner}: simulated over measured tasks of a step - 1, %",
            source="measured",
            value=statistics.median(own),
            samples=tuple(own),
        )
    sizes = [abs(one) for one in errors]
    yield median_figure(
        f"{of}: simulated against measured tasks of a step, median error, % (goal: 5)", sizes, labels={}
    )


def cores() -> int:
    """Returns how many ranks can have a core each."""
    return len(os.sched_getaffinity(0))


def too_few_cores(name: str, size: int) -> Iterator[Figure]:
    """Says why so many ranks were not measured."""
    reason = f"this machine has {cores()} cores, and each rank needs one"
    yield missing_figure(f"{name}, {size} ranks: planned: step, ms", reason)
    for rival in RIVALS:
        yield missing_figure(f"{name}, {size} ranks: {rival}: step over the planned one's, ratio", reason)
