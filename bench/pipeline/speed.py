"""How long planning takes on this machine, and how good it is: all of it measured but for the gaps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bench.pipeline.steps import Job, options
from bench.record import Figure, missing_figure
from mosaic import _search
from mosaic.errors import InfeasibleError
from mosaic.pipelining.order.simulate import roll_out, simulate
from mosaic.pipelining.pair_layers import pair_layers
from mosaic.pipelining.partition.methods import partition_by
from mosaic.pipelining.rank_memory import rank_timelines
from mosaic.pipelining.tuning.candidates import Candidates
from mosaic.pipelining.tuning.pairs import pair_table, pairs_of, rank_pairs
from mosaic.pipelining.tuning.tune import tune


def rollouts(name: str, num_microbatches: int) -> Iterator[Figure]:
    """One roll-out of a model's step."""
    job = Job(name=name, num_microbatches=num_microbatches, with_memory=False)
    graph = job.space.tasks(job.request, partition_by("separated", job.request), job.step(0))
    times_us = [1e6 * _search.time_rollouts(graph.compiled, 200) for _ in range(7)]
    yield Figure(
        name=f"roll-out of {name}, {num_microbatches} microbatches, us",
        source="measured",
        value=statistics.median(times_us),
        samples=tuple(times_us),
        labels={"tasks": str(len(graph.tasks))},
    )


def large_step(name: str, num_microbatches: int, seconds: float) -> Iterator[Figure]:
    """A step of thousands of GPUs: emulated with its memory, and planned."""
    began = time.perf_counter()
    job = Job(name=name, num_microbatches=num_microbatches)
    step = job.step(0)
    partition = partition_by("separated", job.request)
    graph = job.space.tasks(job.request, partition, step, strategies="recompute")
    rolled = roll_out(graph)
    tasks = {"tasks": str(len(graph.tasks))}
    if isinstance(rolled, tuple):
        rank_timelines(graph, rolled[1].start_ns)
    took = time.perf_counter() - began
    yield Figure(
        name=f"{name}: step from nothing, simulated with its memory, s", source="measured", value=took, labels=tasks
    )
    began = time.perf_counter()
    try:
        job.plan(step, options(seconds))
    except InfeasibleError as error:
        yield missing_figure(f"{name}: planned with {seconds:g} s of search, s", error)
        return
    took = time.perf_counter() - began
    yield Figure(name=f"{name}: planned with {seconds:g} s of search, s", source="measured", value=took, labels=tasks)


def layer_tuning(name: str, num_microbatches: int, limit_share: float) -> Iterator[Figure]:
    """Choices for the pairs of a rank with a share of the memory that keeping everything takes; and the whole loop."""
    free = Job(name=name, num_microbatches=num_microbatches, with_memory=False)
    step, partition = free.step(0), partition_by("separated", free.request)
    kept = free.space.tasks(free.request, partition, step)
    rolled = roll_out(kept)
    assert isinstance(rolled, tuple)
    orders, timed = rolled
    limits = tuple(
        round(base + limit_share * (peak - base)) for peak, base in zip(timed.peak_bytes, kept.base_bytes, strict=True)
    )
    graph = replace(kept, limit_bytes=limits)
    layers, candidates = pair_layers(free.model, partition, step), Candidates()
    pairs = pairs_of(graph, lambda task: candidates.of(layers[task.chunk, task.microbatch, task.piece]))
    rank, own = next(iter(rank_pairs(graph, pairs).items()))
    table, snapshot = pair_table(own), own.snapshot(graph, timed.start_ns)
    ones = [1.0] * len(own.pairs)
    times_ms, gap = [], 0.0
    for _ in range(7):
        began = time.perf_counter()
        found = table.select(
            [snapshot], limit_bytes=limits[rank], forward_weights=ones, backward_weights=ones, gap=0.03
        )
        times_ms.append(1e3 * (time.perf_counter() - began))
        gap = found.cost_ns / found.bound_ns - 1 if found.bound_ns > 0 else 0.0
    of = f"layer tuning of {name}, {num_microbatches} microbatches"
    labels = {"pairs": str(len(own.pairs)), "room": f"{limit_share:g} of what keeping everything takes"}
    yield Figure(
        name=f"{of}: one rank, ms", source="measured", value=statistics.median(times_ms), samples=tuple(times_ms),
        labels=labels,
    )  # fmt: skip
    yield Figure(name=f"{of}: above the bound of the time added, %", source="simulated", value=100 * gap, labels=labels)
    began = time.perf_counter()
    tuned = tune(graph, pairs, partial(simulate, orders=orders))
    took = time.perf_counter() - began
    yield Figure(name=f"{of}: all ranks, re-simulated, s", source="measured", value=took, labels=labels)
    if hasattr(tuned, "bound_ns"):
        longer = 100 * (tuned.timed.makespan_ns / tuned.bound_ns - 1)
        yield Figure(
            name=f"{of}: step over that with everything kept, %", source="simulated", value=longer, labels=labels
        )
    else:
        yield missing_figure(f"{of}: step over that with everything kept, %", str(tuned), source="simulated")
