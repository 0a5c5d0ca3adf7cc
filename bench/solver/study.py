"""Plans of random instances: proofs, bounds and search times, and other planners' steps over the exact plan's.

Gains are simulated, search times are measured on this machine.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.papers.printed import printed
from bench.record import Figure, Source, summary_figure
from bench.solver.generate import SHAPES, Recipe, Shape, generate, ofasys
from mosaic.plan import Plan
from mosaic.solver import SearchLimits, SearchOptions, solve
from mosaic.solver.compare import compare
from mosaic.solver.exact import search_exactly
from mosaic.solver.instance import Instance, TableCost
from mosaic.solver.options import all_options
from mosaic.solver.stage import Machine

RIVALS = ("gahc", "megatron", "distmm", "spindle")
BRANCHED: tuple[Shape, ...] = ("star", "layered", "multi", "align")
"""Shapes with modules that can run at the same time."""
TEN = "10 modules, 8 GPUs, 10 %"


def figure(name: str, samples: Sequence[float], source: Source, *, paper: str = "", **more: Any) -> Figure:
    labels = {"samples": str(len(samples))} | ({"paper": paper} if paper else {})
    return summary_figure(name, samples, source=source, labels=labels, reason="no planner has a plan", **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """An exact search of one instance."""

    cost_ms: float
    is_proven: bool
    seconds: float
    """Wall time from options to stages."""


def search(instance: Instance, *, seconds: float) -> Searched:
    """Runs the exact search; its options are listed before the clock starts."""
    cost, device, count = TableCost(instance), instance.device, instance.num_devices
    options = all_options(instance.graph, cost=cost, device=device, num_devices=count)
    machine = Machine(num_devices=count, num_slots=instance.num_slots, memory_bytes=instance.memory_bytes)
    began = time.perf_counter()
    result = search_exactly(instance.graph, options, cost=cost, machine=machine, limits=SearchLimits(effort=seconds))
    took = time.perf_counter() - began
    return Searched(cost_ms=result.cost_ms, is_proven=result.record.status == "optimal", seconds=took)


def plan_of(instance: Instance, *, method: str = "exact", seconds: float, **search: object) -> Plan:
    """Plans an instance; Algorithm 1, which has no time limit in its paper, gets an hour."""
    limits = SearchLimits(effort=3600.0 if method == "gahc" else seconds)
    options = SearchOptions(limits=limits, **search)  # type: ignore[arg-type]
    device, count = instance.device, instance.num_devices
    return solve(instance.graph, TableCost(instance), device, num_devices=count, method=method, search=options)


def gains(*, seeds: int, num_modules: int, seconds: float) -> Iterator[Figure]:
    """Other planners' steps over the exact plan's."""
    for shape in BRANCHED:
        samples: dict[str, list[float]] = defaultdict(list)
        for seed in range(seeds):
            drawn = generate(Recipe(shape=shape, num_modules=num_modules, seed=seed))
            rows = compare(
                drawn.graph,
                TableCost(drawn),
                drawn.device,
                num_devices=drawn.num_devices,
                methods=(*RIVALS, "exact"),
                search=SearchOptions(limits=SearchLimits(effort=seconds)),
            )
            times_ms = {row.method: row.plan.predicted_ms for row in rows if row.plan is not None}
            for rival in RIVALS:
                if rival in times_ms:
                    samples[rival].append(times_ms[rival] / times_ms["exact"])
        for rival in RIVALS:
            name = f"gain of exact over {rival}, {num_modules} modules {shape}, 8 GPUs, median"
            yield figure(name, samples[rival], "simulated")


def ten_modules(*, seeds: int, seconds: float) -> Iterator[Figure]:
    """Ten modules on eight GPUs in steps of 10 %, every shape, memory loose and tight; one at a time."""
    searches = [
        search(generate(Recipe(shape=shape, num_modules=10, tight_memory=tight, seed=seed)), seconds=seconds)
        for shape in SHAPES
        for tight in (False, True)
        for seed in range(seeds)
    ]
    name = f"{TEN}: proven optimal within {seconds:g} s, share of instances"
    yield figure(name, [float(search.is_proven) for search in searches], "measured", statistic=statistics.fmean)
    yield figure(f"{TEN}: search time, median, s", [search.seconds for search in searches], "measured")


def held_memory(*, seeds: int, sizes: Sequence[int], seconds: float) -> Iterator[Figure]:
    """Memory held across stages, if it is tight."""
    for size in sizes:
        plans = [
            plan_of(
                generate(Recipe(shape=shape, num_modules=size, tight_memory=True, held_memory=True, seed=seed)),
                seconds=seconds,
            )
            for shape in BRANCHED
            for seed in range(seeds)
        ]
        of = f"{size} modules, 8 GPUs, memory held across stages and tight, {seconds:g} s"
        proven = [float(plan.search.status == "optimal") for plan in plans]
        yield figure(f"{of}: proven optimal, share of instances", proven, "measured", statistic=statistics.fmean)


def search_times(*, sizes: Sequence[int], seeds: int, seconds: float) -> Iterator[Figure]:
    """The paper's Fig. 13: search time of Algorithm 1 and of the exact search, and Algorithm 1's optimality."""
    paper = printed("mosaic", "Fig. 13b")
    for size in sizes:
        drawn = [ofasys(size, seed=seed) for seed in range(seeds)]
        exact = [search(instance, seconds=seconds) for instance in drawn]
        greedy, times = [], []
        for instance in drawn:
            began = time.perf_counter()
            greedy.append(plan_of(instance, method="gahc", seconds=seconds).predicted_ms)
            times.append(time.perf_counter() - began)
        yield figure(f"Fig. 13a: Mosaic mapping-solver, {size} modules, median, s", times, "measured")
        yield figure(f"Fig. 13a: exact, {size} modules, median, s", [each.seconds for each in exact], "measured")
        shares = [100 * each.cost_ms / ms for each, ms in zip(exact, greedy, strict=True) if each.is_proven]
        name = f"Fig. 13b: optimality of the Mosaic mapping-solver, {size} modules, median, %"
        yield figure(name, shares, "simulated", paper=paper.get(str(size), ""))


def granularity(*, num_modules: int, seeds: int, seconds: float) -> Iterator[Figure]:
    """The paper's Fig. 14b: search time and quality as the steps of quotas become finer."""
    plans: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for seed in range(seeds):
        drawn = ofasys(num_modules, num_slots=100, seed=seed)
        for percent in (30, 20, 10, 5, 1):
            for method in ("exact", "gahc"):
                began = time.perf_counter()
                percents = tuple(range(percent, 101, percent))
                plan = plan_of(drawn, method=method, seconds=seconds, percents=percents, use_spare_slots=False)
                plans[percent, method].append((plan.predicted_ms, time.perf_counter() - began))
    paper = printed("mosaic", "Fig. 14b")
    best_ms = [min(rows[seed][0] for rows in plans.values()) for seed in range(seeds)]
    for (percent, method), rows in plans.items():
        of = f"Fig. 14b: {method}, OFASys {num_modules} modules, steps of {percent} %"
        papers = [paper[f"{what}, {percent}"] if method == "gahc" else "" for what in ("search time", "best over plan")]
        yield figure(f"{of}: search time, median, s", [took for _, took in rows], "measured", paper=papers[0])
        shares = [100 * best / ms for best, (ms, _) in zip(best_ms, rows, strict=True)]
        yield figure(f"{of}: best known over plan, median, %", shares, "simulated", paper=papers[1])
