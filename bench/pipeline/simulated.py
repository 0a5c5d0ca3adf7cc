"""Steps of PipeWeaver's and Cornstarch's models, simulated on their own devices as described."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.pipeline.steps import Job, options, own_options, ratios, simulated
from bench.record import Figure, missing_figure
from mosaic.errors import InfeasibleError
from mosaic.pipelining.baselines import one_f_one_b
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.orders import OrderLimits, Searched, search_orders
from mosaic.pipelining.partition import Partition
from mosaic.pipelining.task_graph import task_graph
from mosaic.pipelining.tasks import Timed, roll_out, simulate

RIVALS = ("megatron", "nnscaler*", "optimus-coarse")
"""Those that PipeWeaver compares with; Optimus knows no decoders."""
OWN = "any partition"
"""The default of ``plan_step``; ``planned`` is PipeWeaver's way: separated modules."""


def figure_9a(names: Sequence[str], seeds: Sequence[int], seconds: float) -> Iterator[Figure]:
    """Baselines' steps over the planned one's."""
    for name in names:
        job = Job(name=name)
        steps = [job.step(seed) for seed in seeds]
        plans = [job.plan(step, options(seconds)) for step in steps]
        yield simulated(f"Fig. 9a: {name}: planned: step, s", [plan.makespan_ns / 1e9 for plan in plans])
        pairs = list(zip(steps, plans, strict=True))
        yield simulated(f"Fig. 9a: {name}: planned: MFU", [job.mfu(step, plan.makespan_ns) for step, plan in pairs])
        yield simulated(f"Fig. 9a: {name}: planned: above its bound, %", [100 * plan.gap for plan in plans])
        own = [job.plan(step, own_options(seconds)) for step in steps]
        shares = [one.makespan_ns / plan.makespan_ns for one, plan in zip(own, plans, strict=True)]
        yield simulated(f"Fig. 9a: {name}: {OWN}: step over the planned one's, ratio", shares)
        rivals = [job.contend(step, (*RIVALS, "1f1b", "dynapipe-order", "zb-v")) for step in steps]
        yield from ratios(f"Fig. 9a: {name}", plans, rivals, what="step over the planned one's")


def figure_12(name: str, seeds: Sequence[int], seconds: Sequence[float], threads: int) -> Iterator[Figure]:
    """The gap to the bound of PipeWeaver's search and of ours after so many seconds, without limits of memory."""
    job = Job(name=name, with_memory=False)
    partition = partition_by("separated", job.request)
    graphs = [task_graph(job.model, partition, job.step(seed), job.space) for seed in seeds]
    for method in ("tree", "shifts"):
        limits = OrderLimits(effort=max(seconds), threads=threads)
        found = [search_orders(graph, method=method, limits=limits) for graph in graphs]
        for limit in seconds:
            gaps = []
            for one in found:
                assert isinstance(one, Searched)
                reached = min(time_ns for at, time_ns in one.progress if at <= limit or time_ns == one.progress[0][1])
                gaps.append(100 * (reached / one.bound_ns - 1))
            yield simulated(f"Fig. 12: {name}: {method}, {limit:g} s: above the bound, %", gaps)


def figure_14(names: Sequence[str], seconds: float, num_microbatches: int = 64) -> Iterator[Figure]:
    """Models of thousands of GPUs: operations over the peak, and Megatron-LM's step over the planned one's."""
    for name in names:
        job = Job(name=name, num_microbatches=num_microbatches)
        step = job.step(0)
        try:
            plan = job.plan(step, options(seconds))
        except InfeasibleError as error:
            yield missing_figure(f"Fig. 14: {name}: planned: MFU", error, source="simulated")
            continue
        yield simulated(f"Fig. 14: {name}: planned: MFU", [job.mfu(step, plan.makespan_ns)])
        yield simulated(f"Fig. 14: {name}: planned: above its bound, %", [100 * plan.gap])
        yield from ratios(f"Fig. 14: {name}", [plan], [job.contend(step, RIVALS)], what="step over the planned one's")


def cornstarch_frozen(text: str) -> Iterator[Figure]:
    """1F1B of parts that are balanced by what trains, or as if all trained (Table 3; 10 and 11)."""
    at = {"s": "Table 10", "m": "Table 3", "l": "Table 11"}[text]
    for name in ("vlm-s", "vlm-m", "vlm-l", "alm-s", "alm-m", "alm-l"):
        job = Job(name=f"cornstarch-{name}-llm-{text}", num_microbatches=24)
        aware, unaware = (
            _by_1f1b(job, partition_by("mixed-time", replace(job.request, frozen_aware=is_aware, strategy="recompute")))
            for is_aware in (True, False)
        )
        yield _ratio(f"Cornstarch {at}: {name}: unaware of what is frozen over aware, ratio", unaware, aware)


def _by_1f1b(job: Job, partition: Partition) -> int | None:
    space = replace(job, with_memory=False).space
    graph = task_graph(job.model, partition, job.step(0), space, strategies="recompute")
    (orders,) = one_f_one_b(graph, partition)
    played = simulate(graph, orders)
    return played.makespan_ns if isinstance(played, Timed) else None


def _ratio(name: str, numerator: float | None, denominator: float | None) -> Figure:
    if numerator is None or not denominator:
        return missing_figure(name, "its memory does not hold", source="simulated")
    return simulated(name, [numerator / denominator])


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
