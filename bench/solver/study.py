"""What is proven, how fast, and what a plan is worth over other planners' plans.

Gains are simulated, search times are measured on this machine. A figure that could not be had has a reason.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

from bench.papers.printed import printed
from bench.record import Figure, Source, interval, missing_figure, one_line
from bench.solver.generate import SHAPES, Recipe, Shape, build, generate, ofasys
from bench.solver.table_1 import BACKBONES, ENCODERS
from mosaic.cli.counting import count_workload
from mosaic.cost import Cost
from mosaic.cost.analytic_cost import AnalyticCost
from mosaic.cost.degrees import degrees_to_look_at
from mosaic.device import Device
from mosaic.errors import InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.hardware import find_cluster
from mosaic.models import PAPER_MODELS
from mosaic.plan import Plan
from mosaic.solver import QuotaGrid, SearchLimits, SearchOptions, solve
from mosaic.solver.compare import compare
from mosaic.solver.exact import search_exactly
from mosaic.solver.instance import Instance, TableCost
from mosaic.solver.options import all_options
from mosaic.solver.stage import Machine

RIVALS = ("gahc", "megatron", "distmm", "spindle")
WITH_BACKBONE: tuple[Shape, ...] = ("star", "layered", "multi")
MODELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Qwen3-VL": ("qwen3vl_vision", "qwen3vl_text", "qwen3vl_llm"),
        "Unified-IO 2": ("uio2_vision", "uio2_audio", "uio2_text", "uio2_llm"),
        "ImageBind": ("imagebind_vision", "imagebind_audio", "imagebind_text"),
        "OFASys": ("ofasys_vision", "ofasys_text", "ofasys_audio", "ofasys_llm"),
    }
)
"""Rows of the paper's Table 1; encoders feed the language model, where there is one."""
TEN = "10 modules, 8 GPUs, 10 %"
GOALS: Mapping[str, Callable[[float], bool]] = MappingProxyType(
    {
        f"{TEN}: proven optimal within 10 s, share of instances": lambda value: value >= 1,
        f"{TEN}: search time, median, s": lambda value: value <= 0.001,
        f"{TEN}: search time, worst, s": lambda value: value <= 0.5,
        "20 modules, 8 GPUs, with a backbone: proven gap within 5 s, median, %": lambda value: value <= 0.1,
        "20 modules, 32 GPUs, with a backbone: proven gap within 5 s, median, %": lambda value: value <= 0.1,
    }
)
"""What is asked of the planner, by the names of figures."""


def figure(
    name: str,
    samples: Sequence[float],
    source: Source,
    *,
    statistic: Callable[[list[float]], float] = statistics.median,
    paper: str = "",
    reason: str = "",
) -> Figure:
    """Returns a statistic of samples with its bootstrapped 95 % interval; without a number where there is a reason."""
    labels = {"samples": str(len(samples))} | ({"paper": paper} if paper else {})
    if not samples or reason:
        why = reason or "no instance of it could be had"
        return Figure(name=name, source=source, value=None, samples=tuple(samples), reason=why, labels=labels)
    if len(samples) > 1:
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        labels |= {"p10": f"{tenths[0]:.4g}", "p90": f"{tenths[-1]:.4g}"}
    low, high = interval(list(samples), statistic, 0)
    value = statistic(list(samples))
    return Figure(name=name, source=source, value=value, low=low, high=high, samples=tuple(samples), labels=labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """An exact search of one instance."""

    cost_ms: float
    """Time of the plan."""
    bound_ms: float
    """No plan takes less."""
    is_proven: bool
    """Whether they are the same."""
    seconds: float
    """Wall time from options to stages."""

    @property
    def gap(self) -> float:
        """How far the plan may be above the best one, in per cent of the bound."""
        return 100 * (self.cost_ms / self.bound_ms - 1) if self.bound_ms > 0 else float("inf")


def search(instance: Instance, *, seconds: float) -> Searched:
    """Runs the exact search; its options are listed before the clock starts."""
    cost, device, count = TableCost(instance), instance.device, instance.num_devices
    options = all_options(instance.graph, cost=cost, device=device, num_devices=count)
    machine = Machine(num_devices=count, num_slots=instance.num_slots, memory_bytes=instance.memory_bytes)
    began = time.perf_counter()
    found = search_exactly(instance.graph, options, cost=cost, machine=machine, limits=SearchLimits(effort=seconds))
    took = time.perf_counter() - began
    is_proven = found.record.status == "optimal"
    return Searched(cost_ms=found.cost_ms, bound_ms=found.record.bound_ms, is_proven=is_proven, seconds=took)


def ten_modules(*, seeds: int, seconds: float, disturbed: bool) -> Iterator[Figure]:
    """Ten modules on eight GPUs in steps of 10 %, every shape, memory loose and tight; one at a time."""
    found = [
        search(
            generate(Recipe(shape=s, num_modules=10, tight_memory=tight, disturbed=disturbed, seed=seed)),
            seconds=seconds,
        )
        for s in SHAPES
        for tight in (False, True)
        for seed in range(seeds)
    ]
    of = TEN + (", with interference" if disturbed else "")
    times, proven = [one.seconds for one in found], [float(one.is_proven) for one in found]
    name = f"{of}: proven optimal within {seconds:g} s, share of instances"
    yield figure(name, proven, "measured", statistic=statistics.fmean)
    yield figure(f"{of}: search time, median, s", times, "measured")
    yield figure(f"{of}: search time, worst, s", times, "measured", statistic=max)


def twenty_modules(*, seeds: int, seconds: float = 5.0) -> Iterator[Figure]:
    """Twenty modules on 8 and 32 GPUs: how far plan and bound are apart after five seconds."""
    for count in (8, 32):
        for kind, shapes in (("with a backbone", WITH_BACKBONE), ("purely parallel", ("align",))):
            made = [
                generate(Recipe(shape=shape, num_modules=20, num_devices=count, seed=seed))
                for shape in shapes
                for seed in range(seeds)
            ]
            with ThreadPoolExecutor(2) as pool:  # the extension releases Python's lock
                gaps = list(pool.map(lambda one: search(one, seconds=seconds).gap, made))
            of = f"20 modules, {count} GPUs, {kind}: proven gap within {seconds:g} s"
            yield figure(f"{of}, median, %", gaps, "simulated")
            yield figure(f"{of}, worst, %", gaps, "simulated", statistic=max)


def held_memory(*, seeds: int, sizes: Sequence[int], seconds: float) -> Iterator[Figure]:
    """Memory that modules keep across stages, where it is tight: how sure plans are, and what it costs."""
    for size in sizes:
        plans: list[tuple[Plan, Plan]] = []
        for shape in ("star", "layered", "multi", "align"):
            for seed in range(seeds):
                recipe = Recipe(shape=shape, num_modules=size, tight_memory=True, held_memory=True, seed=seed)
                one = generate(recipe)
                plans.append((plan_of(one, seconds=seconds), plan_of(one, seconds=seconds, hold_memory=False)))
        of = f"{size} modules, 8 GPUs, memory held across stages and tight, {seconds:g} s"
        proven = [float(held.search.status == "optimal") for held, _ in plans]
        gaps = [100 * (held.predicted_ms / held.search.bound_ms - 1) for held, _ in plans]
        lost = [100 * (held.predicted_ms / free.predicted_ms - 1) for held, free in plans]
        mean = statistics.fmean
        yield figure(f"{of}: proven optimal, share of instances", proven, "measured", statistic=mean)
        yield figure(f"{of}: step over its bound, mean, %", gaps, "simulated", statistic=mean)
        yield figure(f"{of}: step over its bound, worst, %", gaps, "simulated", statistic=max)
        yield figure(f"{of}: what it costs, mean, %", lost, "simulated", statistic=mean)


def plan_of(instance: Instance, *, method: str = "exact", seconds: float, **search: object) -> Plan:
    """Plans an instance; Algorithm 1 has an hour, since its paper ends it by no clock."""
    limits = SearchLimits(effort=3600.0 if method == "gahc" else seconds)
    options = SearchOptions(limits=limits, **search)  # type: ignore[arg-type]
    device, count = instance.device, instance.num_devices
    return solve(instance.graph, TableCost(instance), device, num_devices=count, method=method, search=options)


def ratios(
    graph: ModuleGraph, cost: Cost, device: Device, num_devices: int, *, seconds: float, hold_memory: bool = True
) -> dict[str, float]:
    """Returns each rival's predicted step over the exact plan's; without rivals that have no plan."""
    search = SearchOptions(limits=SearchLimits(effort=seconds), hold_memory=hold_memory)
    rows = compare(graph, cost, device, num_devices=num_devices, methods=(*RIVALS, "exact"), search=search)
    times = {row.method: row.predicted_ms for row in rows if row.predicted_ms is not None}
    return {rival: times[rival] / times["exact"] for rival in RIVALS if rival in times and "exact" in times}


def model(name: str, *, num_devices: int = 8, seed: int = 0, disturbed: bool = True) -> Instance:
    """Returns a model of Table 1, its modules' work drawn around the table's."""
    rows = {kind.name: kind for kind in (*BACKBONES, *ENCODERS)}
    kinds = [rows[row] for row in MODELS[name]]
    waits: list[tuple[int, ...]] = [()] * len(kinds)
    if kinds[-1] in BACKBONES:
        waits[-1] = tuple(range(len(kinds) - 1))
    recipe = Recipe(shape="star", num_modules=len(kinds), num_devices=num_devices, disturbed=disturbed, seed=seed)
    return build(recipe, kinds, waits, random.Random(f"{name} {seed}"), name=f"{name}-{num_devices}-{seed}")


def gains(*, seeds: int, num_modules: int, seconds: float) -> Iterator[Figure]:
    """Ratios of step times, rival over exact, for Table 1's models and for generated shapes."""
    groups = {name: [model(name, seed=seed) for seed in range(seeds)] for name in MODELS}
    for shape in (*WITH_BACKBONE, "align"):
        recipes = [Recipe(shape=shape, num_modules=num_modules, seed=seed) for seed in range(seeds)]
        groups[f"{num_modules} modules {shape}"] = list(map(generate, recipes))
    paper = printed("mosaic", "Fig. 9")
    for of, made in groups.items():
        samples: dict[str, list[float]] = defaultdict(list)
        for one in made:
            found = ratios(one.graph, TableCost(one), one.device, one.num_devices, seconds=seconds)
            for rival, ratio in found.items():
                samples[rival].append(ratio)
        for rival in RIVALS:
            says = paper.get(rival, "") if of in MODELS else ""
            name = f"gain of exact over {rival}, {of}, 8 GPUs, median"
            yield figure(name, samples[rival], "simulated", paper=says)


def gains_of_models(
    *, size: str, batch: int, num_devices: Sequence[int], seconds: float, models: Sequence[str] = PAPER_MODELS
) -> Iterator[Figure]:
    """The same for the paper's models themselves: counted operators, memory checked stage by stage."""
    paper = printed("mosaic", "Fig. 9")
    for name in models:
        samples: dict[str, list[float]] = defaultdict(list)
        counted = count_workload(
            f"zoo:{name}-{size}:{batch}", degrees_to_look_at(max(num_devices)), kind="cuda", dtype="bfloat16"
        )
        reason = ""
        for count in num_devices:
            cluster = find_cluster("h100-80g", count)
            cost, device = AnalyticCost(counted.counts, cluster), cluster.hardware.device()
            try:
                found = ratios(counted.graph, cost, device, count, seconds=seconds, hold_memory=False)
            except InfeasibleError as error:
                reason = f"{count} GPUs: {one_line(error, most=200)}"
                continue
            for rival, ratio in found.items():
                samples[rival].append(ratio)
        of = f"{name} ({size}, batch {batch}, {counted.dtype}, {len(counted.graph.names)} modules, h100-80g)"
        on = ", ".join(map(str, num_devices))
        for rival in RIVALS:
            why = "" if samples[rival] else reason or "that planner made no plan of it"
            title = f"gain of exact over {rival}, {of}, {on} GPUs, median"
            yield figure(title, samples[rival], "predicted", paper=paper.get(rival, ""), reason=why)


def search_times(*, sizes: Sequence[int], seeds: int, seconds: float) -> Iterator[Figure]:
    """The paper's Fig. 13: search time of Algorithm 1 and of the exact search, and Algorithm 1's optimality."""
    for size in sizes:
        made = [ofasys(size, num_devices=8, disturbed=False, seed=seed) for seed in range(seeds)]
        exact = [search(one, seconds=seconds) for one in made]
        greedy, times = [], []
        for one in made:
            began = time.perf_counter()
            greedy.append(plan_of(one, method="gahc", seconds=seconds).predicted_ms)
            times.append(time.perf_counter() - began)
        yield figure(f"Fig. 13a: Mosaic mapping-solver, {size} modules, median, s", times, "measured")
        yield figure(f"Fig. 13a: exact, {size} modules, median, s", [one.seconds for one in exact], "measured")
        shares = [100 * one.cost_ms / ms for one, ms in zip(exact, greedy, strict=True) if one.is_proven]
        name = f"Fig. 13b: optimality of the Mosaic mapping-solver, {size} modules, median, %"
        paper = printed("mosaic", "Fig. 13b").get(str(size), "")
        yield figure(name, shares, "simulated", paper=paper)


def throughput(*, seeds: int, seconds: float) -> Iterator[Figure]:
    """The paper's Fig. 14a: OFASys with four modules against the others, as GPUs are added."""
    paper = printed("mosaic", "Fig. 14a")
    for count in (8, 16, 32):
        made = [model("OFASys", num_devices=count, seed=seed) for seed in range(seeds)]
        found = [ratios(one.graph, TableCost(one), one.device, count, seconds=seconds) for one in made]
        for rival in ("megatron", "spindle", "distmm"):
            name = f"Fig. 14a: throughput over {rival}, OFASys, {count} GPUs, median"
            yield figure(name, [one[rival] for one in found], "simulated", paper=paper[f"{rival}, {count}"])


def granularity(*, num_modules: int, seeds: int, seconds: float) -> Iterator[Figure]:
    """The paper's Fig. 14b: search time and quality as the steps of quotas become finer."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for seed in range(seeds):
        one = ofasys(num_modules, num_devices=8, num_slots=100, disturbed=False, seed=seed)
        for percent in (30, 20, 10, 5, 1):
            for method in ("exact", "gahc"):
                began = time.perf_counter()
                grid = QuotaGrid(percents=tuple(range(percent, 101, percent)))
                plan = plan_of(one, method=method, seconds=seconds, grid=grid, use_spare_slots=False)
                found[percent, method].append((plan.predicted_ms, time.perf_counter() - began))
    paper = printed("mosaic", "Fig. 14b")
    best_ms = [min(rows[seed][0] for rows in found.values()) for seed in range(seeds)]
    for (percent, method), rows in found.items():
        says = {
            what: paper[f"{what}, {percent}"] if method == "gahc" else "" for what in ("search time", "best over plan")
        }
        of = f"Fig. 14b: {method}, OFASys {num_modules} modules, steps of {percent} %"
        times = [seconds for _, seconds in rows]
        yield figure(f"{of}: search time, median, s", times, "measured", paper=says["search time"])
        shares = [100 * best / ms for best, (ms, _) in zip(best_ms, rows, strict=True)]
        yield figure(f"{of}: best known over plan, median, %", shares, "simulated", paper=says["best over plan"])


def with_missing(figures: Sequence[Figure]) -> list[Figure]:
    """Adds a figure without a number for each goal that no figure answers."""
    missing = set(GOALS) - {one.name for one in figures}
    return [*figures, *(missing_figure(name, "its part of the study made no such figure") for name in sorted(missing))]


def goals_table(figures: Sequence[Figure]) -> list[str]:
    """Returns a line for each figure that has a goal."""
    lines = []
    for one in figures:
        if (is_met := GOALS.get(one.name)) is not None:
            reached = one.value is not None and is_met(one.value)
            shown = f"not had: {one.reason}" if one.value is None else f"{one.value:.4g}"
            lines.append(f"{one.name}: {shown} ({'reached' if reached else 'NOT reached'})")
    return lines
