"""Figures and tables of PipeWeaver and Cornstarch, simulated on their own devices as described."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.papers.baselines import PAPER_BASELINES
from bench.papers.generators import rise_and_fall
from bench.pipeline.replicated import REPLICATED_RANKS, replicated
from bench.pipeline.steps import Job, options, own_options, ratios, simulated
from bench.record import Figure, missing_figure
from mosaic.errors import InfeasibleError
from mosaic.pipelining.baselines import one_f_one_b
from mosaic.pipelining.compare import STRATEGIES, contend
from mosaic.pipelining.order.search import METHODS, OrderLimits, Searched, search_orders
from mosaic.pipelining.order.simulate import roll_out, simulate
from mosaic.pipelining.partition.methods import partition_by
from mosaic.pipelining.partition.parallel import encoders_colocated, on_given_ranks
from mosaic.pipelining.partition.partition import Partition
from mosaic.pipelining.partition.request import Request
from mosaic.pipelining.semu.step import rank_timelines
from mosaic.pipelining.tasks import TaskGraph, Timed
from mosaic.pipelining.workload.microbatch import Microbatch

RIVALS = ("megatron", "nnscaler*", "optimus-coarse")
"""Those that PipeWeaver compares with; Optimus knows no decoders."""
OWN = "any partition, weights apart or not"
"""The default of ``plan_step``; ``planned`` is PipeWeaver's way: separated modules, weights with inputs."""
_DEEP = "no step of this partition fits"


def table_1(num_microbatches: int, seeds: Sequence[int]) -> Iterator[Figure]:
    """1F1B of one language model, and of an encoder before a smaller one with equal and with drawn microbatches."""
    for name, of in (("lm-7b", "LM 7B"), ("vlm-7b", "ViT 2B + LM 5B")):
        job = Job(name=name, num_microbatches=num_microbatches)
        drawn = [job.step(seed) for seed in seeds]
        if name == "lm-7b":
            kinds = {"": [(Microbatch(text_tokens=8192),) * num_microbatches]}
        else:
            images = round(statistics.fmean(one.images for step in drawn for one in step))
            equal = Microbatch(text_tokens=8192 - 169 * images, images=images)
            kinds = {" (static data)": [(equal,) * num_microbatches], " (dynamic data)": drawn}
        for kind, steps in kinds.items():
            found = [(step, job.contend(step, ("1f1b",))[0]) for step in steps]
            times = [(step, one.makespan_ns) for step, one in found if one.makespan_ns is not None]
            if len(times) < len(found):
                yield missing_figure(f"Table 1: {of}{kind}: MFU", found[0][1].reason, source="simulated")
                continue
            yield simulated(f"Table 1: {of}{kind}: step, s", [time / 1e9 for _, time in times])
            yield simulated(f"Table 1: {of}{kind}: MFU", [job.mfu(step, time) for step, time in times])


def table_5(name: str, seeds: Sequence[int], seconds: float) -> Iterator[Figure]:
    """A step as parts of the planner are added to Megatron's interleaved schedule, all within the devices' memory."""
    job = Job(name=name)
    rows: dict[str, list[float]] = {}
    for seed in seeds:
        step = job.step(seed)
        vanilla = job.contend(step, ("megatron",))[0]
        uniform = _uniform(job, step)
        ranked = search_orders(uniform, method="shifts", limits=OrderLimits(effort=seconds))
        natural = roll_out(uniform)
        assert vanilla.makespan_ns is not None
        assert isinstance(natural, tuple)
        assert isinstance(ranked, Searched)
        tuned, own = job.plan(step, options(seconds)), job.plan(step, own_options(seconds))
        for row, time_ns in (
            ("Megatron-LM", vanilla.makespan_ns),
            ("and separated partition, interleaved", natural[1].makespan_ns),
            ("and ranking", ranked.makespan_ns),
            ("and layer tuning", tuned.makespan_ns),
            (OWN, own.makespan_ns),
        ):
            rows.setdefault(row, []).append(time_ns / 1e9)
    for row, times in rows.items():
        yield simulated(f"Table 5: {name}: {row}: step, s", times)


def _uniform(job: Job, step: Sequence[Microbatch]) -> TaskGraph:
    """The separated partition's tasks with the first strategy for all layers that fits in the natural order."""
    partition = partition_by("separated", job.request)
    for strategy in STRATEGIES:
        graph = job.space.tasks(job.request, partition, step, strategies=strategy)
        if isinstance(roll_out(graph), tuple):
            return graph
    raise InfeasibleError(f"{job.name}: {_DEEP}", reasons=["memory does not hold with any strategy for all layers"])


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


def figure_9b(seconds: float, num_microbatches: int = 16) -> Iterator[Figure]:
    """Forty steps whose images rise and fall twice."""
    job = Job(name="vlm-s")
    steps = rise_and_fall(num_microbatches=num_microbatches, seed=0)
    plans = [job.plan(step, options(seconds)) for step in steps]
    yield simulated("Fig. 9b: planned: step, s", [plan.makespan_ns / 1e9 for plan in plans])
    natural = [roll_out(plan.graph) for plan in plans]
    pairs = [(one[1], plan) for one, plan in zip(natural, plans, strict=True) if isinstance(one, tuple)]
    rolled = [timed.makespan_ns / plan.makespan_ns for timed, plan in pairs]
    yield simulated("Fig. 9b: without search, natural order: step over the planned one's, ratio", rolled)
    for name in RIVALS:
        found = [job.contend(step, (name,))[0] for step in steps]
        own = [(one.makespan_ns or math.nan) / plan.makespan_ns for one, plan in zip(found, plans, strict=True)]
        if any(math.isnan(one) for one in own):
            reason = next(one.reason for one in found if one.makespan_ns is None)
            yield missing_figure(f"Fig. 9b: {name}: step over the planned one's, ratio", reason, source="simulated")
            continue
        yield simulated(f"Fig. 9b: {name}: step over the planned one's, ratio", own)
        for at, values in (("step 6", (own[5], own[25])), ("steps 15 to 20", (*own[14:20], *own[34:40]))):
            yield simulated(f"Fig. 9b: {name}: step over the planned one's, {at}, ratio", values)


def figure_10(sizes: Sequence[int], seconds: float, draws: int = 2000) -> Iterator[Figure]:
    """The best and the worst ranking found for each size of a sub-microbatch of images, without limits of memory."""
    job = Job(name="vlm-s", with_memory=False)
    step = job.step(0)
    best_ns: dict[int, int] = {}
    for size in sizes:
        request = replace(job.request, sizes={"vision": size})
        graph = job.space.tasks(request, partition_by("separated", request), step)
        found = search_orders(graph, method="shifts", limits=OrderLimits(effort=seconds))
        assert isinstance(found, Searched)
        best_ns[size] = found.makespan_ns
        worst = max(_random_ns(graph, seed) for seed in range(draws))
        yield simulated(f"Fig. 10: {size} images a sub-microbatch: best step, s", [found.makespan_ns / 1e9])
        yield simulated(
            f"Fig. 10: {size} images a sub-microbatch: worst ranking over the best, %",
            [100 * (worst / found.makespan_ns - 1)],
        )
    least = min(best_ns, key=lambda size: best_ns[size])
    yield simulated("Fig. 10: best size of a sub-microbatch, images", [float(least)])


def _random_ns(graph: TaskGraph, seed: int) -> int:
    """A random ranking that keeps each microbatch's modules in order, rolled out."""
    ranking = list(graph.compiled.natural_ranking)
    of = {task.group: task.microbatch for task in graph.tasks}
    queues: dict[int, list[int]] = {}
    for group in ranking:
        queues.setdefault(of[group], []).append(group)
    owners = [of[group] for group in ranking]
    random.Random(seed).shuffle(owners)
    played = roll_out(graph, [queues[owner].pop(0) for owner in owners])
    assert isinstance(played, tuple)
    return played[1].makespan_ns


def figure_11(seconds: float) -> Iterator[Figure]:
    """Memory of the first rank over a step of VLM-M: peaks, and how much it varies in the middle half of the step."""
    free = Job(name="vlm-m", with_memory=False)
    step = free.step(0)
    megatron, optimus = contend(
        replace(free.request, chunks_per_rank=2), step, space=free.space, names=("megatron", "optimus-coarse"),
        strategies=("keep",), table=PAPER_BASELINES,
    )  # fmt: skip
    planned = free.plan(step, options(seconds))
    runs: dict[str, tuple[TaskGraph, Timed]] = {"planned, everything kept": (planned.graph, planned.timed)}
    for one in (megatron, optimus):
        assert one.run is not None
        runs[one.name] = one.run.graph, one.run.timed
    try:
        tuned = Job(name="vlm-m").plan(step, options(seconds))
        runs["planned, within the devices' memory"] = tuned.graph, tuned.timed
    except InfeasibleError as error:
        yield missing_figure("Fig. 11: planned, within the devices' memory", error, source="simulated")
    base = 0.0
    for name, (graph, timed) in runs.items():
        line = rank_timelines(graph, timed.start_ns)[0]
        yield simulated(f"Fig. 11: {name}: peak of rank 0, GB", [line.peak_bytes / 1e9])
        quarter = timed.makespan_ns // 4
        middle = [line.bytes_at(quarter + at * quarter // 500) / 1e9 for at in range(1000)]
        yield simulated(f"Fig. 11: {name}: standard deviation of rank 0 in the middle, GB", [statistics.pstdev(middle)])
        base = line.peak_bytes if name == "megatron" else base
    peak = rank_timelines(*_of(runs["optimus-coarse"]))[0].peak_bytes
    yield simulated("Fig. 11: Optimus's peak over Megatron-LM's, %", [100 * (peak / base - 1)])


def _of(run: tuple[TaskGraph, Timed]) -> tuple[TaskGraph, Sequence[int]]:
    return run[0], run[1].start_ns


def figure_12(name: str, seeds: Sequence[int], seconds: Sequence[float], threads: int) -> Iterator[Figure]:
    """How far above the bound each method of search is after so many seconds, without limits of memory."""
    job = Job(name=name, with_memory=False)
    partition = partition_by("separated", job.request)
    graphs = [job.space.tasks(job.request, partition, job.step(seed)) for seed in seeds]
    for method in METHODS:
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


def cornstarch_modules(text: str, names: Sequence[str]) -> Iterator[Figure]:
    """Modules on ranks of their own, against encoders colocated, each on the paper's ranks: throughput a GPU."""
    at = {"s": "Table 7", "m": "Table 2", "l": "Table 8"}[text]
    for name in names:
        job = Job(name=f"cornstarch-{name}-llm-{text}", num_microbatches=24)
        known = job.known
        if known.colocated_ranks is None:
            continue
        counts = dict(zip((module.name for module in job.model.modules), known.ranks, strict=True))
        front, back = known.colocated_ranks
        own = _by_1f1b(job, on_given_ranks(_request(job, sum(known.ranks)), counts))
        unaware = replace(_request(job, front + back), frozen_aware=False)
        both = _by_1f1b(job, encoders_colocated(unaware, front))
        scaled = None if own is None or both is None else (both * (front + back), own * sum(known.ranks))
        yield _ratio(
            f"Cornstarch {at}: {name}: throughput a GPU of modules on their own ranks over colocated, ratio",
            *(scaled or (None, None)),
        )


def cornstarch_steps(text: str, names: Sequence[str]) -> Iterator[Figure]:
    """Steps with encoders on every rank, or colocated before the backbone, over those of modules on their own ranks."""
    for name in names:
        job = Job(name=f"cornstarch-{name}-llm-{text}", num_microbatches=24)
        known = job.known
        counts = dict(zip((module.name for module in job.model.modules), known.ranks, strict=True))
        own = _by_1f1b(job, on_given_ranks(_request(job, sum(known.ranks)), counts))
        figure = "Fig. 13 to 15" if text != "m" else "Fig. 10" if name.startswith("valm") else "Fig. 9"
        of = f"Cornstarch {figure}: {name}, LLM {text}"
        model, partition = replicated(_request(job, REPLICATED_RANKS), job.model)
        replicas = replace(job.request, model=model)
        yield _ratio(
            f"{of}: encoders replicated over modules on their own ranks, ratio", _by_1f1b(job, partition, replicas), own
        )
        if known.colocated_ranks is not None:
            front, back = known.colocated_ranks
            unaware = replace(_request(job, front + back), frozen_aware=False)
            both = _by_1f1b(job, encoders_colocated(unaware, front))
            yield _ratio(f"{of}: encoders colocated over modules on their own ranks, ratio", both, own)


def _request(job: Job, num_ranks: int) -> Request:
    return replace(job.request, num_ranks=num_ranks, strategy="recompute")


def _by_1f1b(job: Job, partition: Partition, request: Request | None = None) -> int | None:
    space = replace(job, with_memory=False).space
    graph = space.tasks(request or job.request, partition, job.step(0), strategies="recompute")
    (orders,) = one_f_one_b(graph, partition)
    played = simulate(graph, orders)
    return played.makespan_ns if isinstance(played, Timed) else None


def _ratio(name: str, numerator: float | None, denominator: float | None) -> Figure:
    if numerator is None or not denominator:
        return missing_figure(name, "its memory does not hold", source="simulated")
    return simulated(name, [numerator / denominator])
