"""Steps of a model by our plan and by baselines in turn on the same executor, and memory of ranks.

Counted times are fitted to one step, which also stands for all when layers are put on ranks; other steps are planned,
simulated and run. Simulated is the time of tasks, from the start of the first one to the end of the last one.

Memory: parameters, gradients and AdamW state of the rank before the step, and above it the most that the CPU allocator
of torch has given out at one time while the step runs, as the profiler of torch records every allocation. Memory that
libraries below torch allocate for themselves is in neither figure.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from bench.pipeline.measured.models import MODELS, MeasuredModel, Microbatch
from bench.record import Figure, median_figure, missing_figure
from mosaic.pipelining.plan import StepPlanner
from mosaic.pipelining.planner import SharedStep
from mosaic.ranks.pipeline.setup import PLANNED, PipelineSetup, make_setup
from mosaic.ranks.pipeline.step import PipelineRunner
from mosaic.ranks.pipeline.trial import fit_modules, gather_spans
from mosaic.ranks.world.world import World


@dataclass(kw_only=True)
class JudgedStep:
    """A step with one schedule."""

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
    counted = [own.counted.microbatch(microbatch) for microbatch in step]
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
    losses, own_spans = runner.run(judged.shared, step, counted=own.count(step))
    took_ms = 1e3 * (time.perf_counter() - began)
    judged.step_ms.append(max(map(json.loads, own.world.all_gather(json.dumps(took_ms)))))
    own.model.zero_grad()
    spans = gather_spans(own_spans, runner.grid.transport)
    starts, ends = zip(*(span for cell, span in spans.items() if cell[0].isdigit()), strict=True)
    judged.tasks_ms.append((max(ends) - min(starts)) / 1e6)
    return losses.tolist()


RIVALS = ("1f1b", "megatron", "gpipe")
"""Baselines, as ``BASELINES`` has them: 1F1B on the mixed partition, interleaved, and all forwards first."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The extent of the study."""

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
    world = World.join(torch.device("cpu"))
    whole, step = model.model(sizes.width, sizes.layers), model.step(0, sizes.microbatches)
    return fit_modules(make_setup(whole, step, world, data=1), step)


def steps(rank: int, size: int, *, name: str, sizes: Sizes) -> Iterator[Figure]:
    """Yields the planned step, baselines over it, and the error of simulated steps, none of which was fitted to."""
    model, of = MODELS[name], f"{name}, {size} ranks"
    own = fitted(model, sizes)
    schedules = {PLANNED: own.make(PLANNED), **{rival: own.make(rival, baseline=rival) for rival in RIVALS}}
    planners = {method: planner for method, planner in schedules.items() if isinstance(planner, StepPlanner)}
    if PLANNED not in planners:
        yield missing_figure(f"{of}: all of it", schedules[PLANNED])
        return
    judged = _in_turn(own, model, sizes, planners)
    ours = [step.step_ms[1:] for step in judged[PLANNED]]
    yield _median(f"{of}: planned: step, ms", ours)
    for rival in RIVALS:
        ratio = f"{of}: {rival}: step over the planned one's, ratio"
        if rival not in judged:
            yield missing_figure(ratio, schedules[rival])
            continue
        theirs = [step.step_ms[1:] for step in judged[rival]]
        yield _median(ratio, [[b / a for a, b in zip(*pair, strict=True)] for pair in zip(ours, theirs, strict=True)])
    errors = [
        abs(100 * (step.simulated_ms / statistics.median(step.tasks_ms[1:]) - 1))
        for each in judged.values()
        for step in each
    ]
    yield median_figure(f"{of}: simulated against measured tasks of a step, median error, % (goal: 5)", errors)


def _in_turn(
    own: PipelineSetup, model: MeasuredModel, sizes: Sizes, planners: dict[str, StepPlanner]
) -> dict[str, list[JudgedStep]]:
    """Runs steps with all schedules in each round; the first round is a warm-up."""
    judged: dict[str, list[JudgedStep]] = {name: [] for name in planners}
    runners = {name: PipelineRunner(own, planner.plan, keeps_all=True) for name, planner in planners.items()}
    for seed in range(1, 1 + sizes.steps):
        step = model.step(seed, sizes.microbatches)
        for name, planner in planners.items():
            judged[name].append(judge(own, planner, step, seconds=sizes.plan_s))
        for _ in range(1 + sizes.rounds):
            losses = {name: torch.tensor(take(own, runner, judged[name][-1], step)) for name, runner in runners.items()}
            for name, values in losses.items():
                torch.testing.assert_close(values, losses[PLANNED], rtol=1e-4, atol=1e-5, msg=f"{name}: other losses")
    return judged


def _median(name: str, by_step: Sequence[Sequence[float]]) -> Figure:
    """Returns the median over rounds of all steps."""
    samples = [sample for each in by_step for sample in each]
    return median_figure(name, samples, labels={"samples": str(len(samples)), "steps": str(len(by_step))})


def memory(rank: int, size: int, *, name: str, sizes: Sizes) -> Iterator[Figure]:
    """Yields the memory of the fullest rank in the plan's step, measured and simulated; each rank is a sample."""
    model, text = MODELS[name], f"{name}, {size} ranks: {PLANNED}: memory of the fullest rank, MB"
    own = fitted(model, sizes)
    planner = own.make(PLANNED)
    if not isinstance(planner, StepPlanner):
        yield missing_figure(text, planner)
        return
    runner = PipelineRunner(own, planner.plan, keeps_all=False)
    step = model.step(1, sizes.microbatches)
    judged = judge(own, planner, step, seconds=sizes.plan_s)
    optimizer = torch.optim.AdamW([p for p in own.model.parameters() if not p.is_meta and p.requires_grad])

    def run() -> None:
        runner.run(judged.shared, step, counted=own.count(step))

    for _ in range(2):  # gradients and the optimizer's state are there, and programs are known
        run()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    mine = held_bytes(own.model, optimizer) + peak_bytes(run)
    measured = [json.loads(answer) for answer in own.world.all_gather(json.dumps(mine))]
    for source, ranks in (("measured", measured), ("simulated", judged.peak_bytes)):
        megabytes = tuple(num_bytes / 1e6 for num_bytes in ranks)
        yield Figure(name=text, source=source, value=max(megabytes), samples=megabytes)


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns what a rank holds between steps, memory that is shared once."""
    parameters = [p for p in model.parameters() if not p.is_meta]
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def peak_bytes(run: Callable[[], None]) -> int:
    """Returns the most that is allocated at one time while something runs, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler.kineto_results  # ``events()`` has only what no operator allocates
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate((change for _, change in sorted(changes, key=lambda pair: pair[0])), initial=0))
