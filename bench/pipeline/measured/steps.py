"""Steps of a model by our plan and by baselines on the same executor, in turn, and memory of ranks in a step.

Counted times are fitted to one step, which also stands for all when layers are put on ranks; other steps are planned,
simulated and run. Simulated is the time of tasks, from the start of the first one to the end of the last one.

Memory: parameters, gradients and AdamW state of the rank before the step, and above it the most that the CPU allocator
of torch has given out at one time while the step runs, as the profiler of torch records every allocation. Memory that
libraries below torch allocate for themselves is in neither figure.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from bench.pipeline.measured.models import MODELS, MeasuredModel, Microbatch
from bench.record import Figure, median_figure, missing_figure
from mosaic.engine.options import RankSettings
from mosaic.pipelining.plan import StepPlanner
from mosaic.pipelining.planner import SharedStep
from mosaic.ranks.pipeline.setup import PLANNED, PipelineOptions, PipelineSetup, make_setup
from mosaic.ranks.pipeline.step import PipelineRunner
from mosaic.ranks.pipeline.trial import fit_modules, gather_spans
from mosaic.ranks.world.world import World


@dataclass(kw_only=True)
class JudgedStep:
    """One step by one way."""

    shared: SharedStep
    simulated_ms: float
    """From its first task's start to its last one's end, simulated before it ran."""
    peak_bytes: Sequence[int]
    """Of each rank, simulated."""
    step_ms: list[float] = field(default_factory=list)
    """Each time that it ran: from the call to the losses, on the slowest rank."""
    tasks_ms: list[float] = field(default_factory=list)
    """Of that from the first task's start to the last one's end, on all ranks."""


def judge(
    own: PipelineSetup, planner: StepPlanner, step: Sequence[Microbatch], *, seconds: float | None = None
) -> JudgedStep:
    """Plans a step on rank 0 for all, and simulates it."""
    counted = [own.counted.microbatch(one) for one in step]
    shared: SharedStep = own.world.broadcast(
        planner.plan_step(counted, seconds=seconds) if own.world.rank == 0 else None
    )
    (schedule,) = shared.schedules
    assert schedule is not None
    _, timed = planner.simulate(counted, schedule)
    return JudgedStep(shared=shared, simulated_ms=timed.makespan_ns / 1e6, peak_bytes=timed.peak_bytes)


def take(own: PipelineSetup, runner: PipelineRunner, judged: JudgedStep, step: Sequence[Microbatch]) -> list[float]:
    """Runs a step once, notes what it took, and drops its gradients; returns its losses."""
    own.world.all_gather("ready")
    began = time.perf_counter()
    ran = runner.run(judged.shared, step, shapes=own.shapes(step))
    judged.step_ms.append(slowest_ms(own, began))
    own.drop_gradients()
    spans = gather_spans(ran.spans, runner.grid.transport)
    starts, ends = zip(*(span for cell, span in spans.items() if cell[0].isdigit()), strict=True)
    judged.tasks_ms.append((max(ends) - min(starts)) / 1e6)
    return ran.losses.tolist()


def slowest_ms(own: PipelineSetup, began: float) -> float:
    """Returns the time since ``began`` of the rank that has taken longest."""
    took = 1e3 * (time.perf_counter() - began)
    return max(float(text) for text in own.world.all_gather(json.dumps(took)))


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
    return len(os.sched_getaffinity(0))


MB = 1e6


def memory(rank: int, size: int, *, name: str, sizes: Sizes) -> Iterator[Figure]:
    """The fullest rank in the plan's step, and each rank's simulated over measured."""
    model, of = MODELS[name], f"{name}, {size} ranks: {PLANNED}"
    own = fitted(model, sizes)
    world = own.world
    planner = own.make(PLANNED)
    if not isinstance(planner, StepPlanner):
        yield missing_figure(f"{of}: memory of the fullest rank, MB", planner)
        return
    runner = own.runner(planner.plan, keeps_all=False)
    step = model.step(1, sizes.microbatches)
    judged = judge(own, planner, step, seconds=sizes.plan_s)
    trained = [one for one in own.model.parameters() if not one.is_meta and one.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def run() -> None:
        runner.run(judged.shared, step, shapes=own.shapes(step))

    for _ in range(2):  # gradients and the optimizer's state are there, and programs are known
        run()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    mine = held_bytes(own.model, optimizer) + peak_bytes(run)
    measured = [json.loads(text) for text in world.all_gather(json.dumps(mine))]
    shares = [100 * (theirs / ours - 1) for theirs, ours in zip(judged.peak_bytes, measured, strict=True)]
    text = f"{of}: memory of the fullest rank, MB"
    for source, found in (("measured", measured), ("simulated", judged.peak_bytes)):
        each = tuple(one / MB for one in found)
        yield Figure(name=text, source=source, value=max(each), samples=each)
    yield Figure(
        name=f"{of}: memory of the fullest rank, simulated over measured - 1, %",
        source="measured",
        value=100 * (max(judged.peak_bytes) / max(measured) - 1),
        samples=tuple(shares),
    )


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns what a rank holds between steps, memory that is shared once."""
    parameters = [one for one in model.parameters() if not one.is_meta]
    tensors = [*parameters, *(one.grad for one in parameters if one.grad is not None)]
    tensors += [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def peak_bytes(run: Callable[[], None]) -> int:
    """Returns the most that is allocated at one time while something runs, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    results = seen.profiler.kineto_results  # ``events()`` has only what no operator allocates
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        held += change
        most = max(most, held)
    return most
