"""How long planning takes on this machine, and how good it is: all of it measured but for the gaps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bench.pipeline.steps import Job, options
from bench.record import Figure, missing_figure
from mosaic.errors import InfeasibleError
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import roll_out, simulate
from mosaic.pipelining.tuning import Candidates, RankPairs, pairs_of, tune


def large_step(name: str, num_microbatches: int, seconds: float) -> Iterator[Figure]:
    """A step of thousands of GPUs: simulated, and planned."""
    began = time.perf_counter()
    job = Job(name=name, num_microbatches=num_microbatches)
    step = job.step(0)
    partition = partition_by("separated", job.request)
    graph = task_graph(job.model, partition, step, job.space, strategies="recompute")
    roll_out(graph)
    tasks = {"tasks": str(len(graph.tasks))}
    took = time.perf_counter() - began
    yield Figure(name=f"{name}: step from nothing, simulated, s", source="measured", value=took, labels=tasks)
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
    kept = task_graph(free.model, partition, step, free.space)
    rolled = roll_out(kept)
    assert isinstance(rolled, tuple)
    orders, timed = rolled
    limits = tuple(
        round(base + limit_share * (peak - base)) for peak, base in zip(timed.peak_bytes, kept.base_bytes, strict=True)
    )
    graph = replace(kept, limit_bytes=limits)
    pairs = pairs_of(graph, Candidates())
    own = RankPairs(graph, pairs, 0)
    own.add_instants(graph, timed.start_ns)
    weights = dict.fromkeys((task for pair in pairs for task in (pair.forward, pair.backward)), 1.0)
    times_ms = []
    for _ in range(7):
        began = time.perf_counter()
        own.select(weights)
        times_ms.append(1e3 * (time.perf_counter() - began))
    of = f"layer tuning of {name}, {num_microbatches} microbatches"
    labels = {"pairs": str(len(own.pairs)), "room": f"{limit_share:g} of what keeping everything takes"}
    yield Figure(
        name=f"{of}: one rank, ms", source="measured", value=statistics.median(times_ms), samples=tuple(times_ms),
        labels=labels,
    )  # fmt: skip
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
