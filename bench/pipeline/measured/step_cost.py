"""What a step of ``mosaic.pipeline`` takes beside its tasks, with a small model: counting, agreements, losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from bench.pipeline.measured.models import MODELS
from bench.pipeline.measured.steps import Sizes, begun
from bench.record import Figure, median_figure
from mosaic.ranks.pipeline.handle import Pipeline
from mosaic.ranks.pipeline.trying.trial import PipelineTrial

WIDTH, LAYERS, MICROBATCHES, STEPS = 64, 2, 8, 6


def step_cost(rank: int, size: int, *, rounds: int) -> Iterator[Figure]:
    """Steps whose shapes were seen before, each of other data."""
    model = MODELS["llava"]
    own = begun(model, Sizes(width=WIDTH, layers=LAYERS, microbatches=MICROBATCHES))
    pipe = Pipeline(own, PipelineTrial(best=own.planned()))
    steps = [model.step(seed, MICROBATCHES) for seed in range(1, 1 + STEPS)]
    for step in steps:
        pipe.step(step)
    whole, tasks = [], []
    for at in range(rounds * STEPS):
        pipe.world.all_gather("ready")
        began = time.perf_counter()
        pipe.step(steps[at % STEPS])
        whole.append(1e3 * (time.perf_counter() - began))
        tasks.append(_tasks_ms(pipe))
    of = f"{MICROBATCHES} microbatches, {size} ranks"
    labels = {"samples": str(len(whole))}
    beside = [one - other for one, other in zip(whole, tasks, strict=True)]
    yield median_figure(f"a step beside its tasks, {of}, ms", beside, labels=labels)
    transport = own.grids.of(pipe.degrees).transport
    known = [steps[at % STEPS] for at in range(rounds)]
    yield _timed(f"of it one agreement of all ranks, {of}, ms", lambda at: transport.tell_all("x" * 200), rounds)
    yield _timed(
        f"of it counting what microbatches cost, {of}, ms",
        lambda at: [own.counted.microbatch(one) for one in known[at]],
        rounds,
    )
    pipe.remove()


def _tasks_ms(pipe: Pipeline) -> float:
    graph, starts = pipe.timeline().measured
    return max(start + task.time_ns for start, task in zip(starts, graph.tasks, strict=True)) / 1e6


def _timed(name: str, run: Callable[[int], object], rounds: int) -> Figure:
    times = []
    for at in range(rounds):
        began = time.perf_counter()
        run(at)
        times.append(1e3 * (time.perf_counter() - began))
    return median_figure(name, times, labels={"samples": str(rounds)})
