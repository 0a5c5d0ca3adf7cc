"""The worth of each part of the formulation: plans with and without it, on the same instances."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean as mean

from bench.record import Figure
from bench.solver.generate import Recipe, Shape, generate
from bench.solver.runs import figure
from bench.solver.table_1 import POD
from mosaic.cost import Cost
from mosaic.plan import Plan
from mosaic.simulate.step import StepModel, simulate
from mosaic.solver import QuotaGrid, SearchOptions, solve
from mosaic.solver.exact.search import SearchLimits
from mosaic.solver.instances.instance import Instance
from mosaic.solver.instances.instance_cost import TableCost
from mosaic.solver.replan.replanner import Replanner

SHAPES: tuple[Shape, ...] = ("star", "layered", "multi", "align")
EDGE_BYTES = 32 * 512 * 4096 * 2
"""Of a batch between two modules: 32 samples of 512 tokens of 4096 bf16 numbers."""
LONG_MS = 100.0
"""A cold solve that takes longer is worth avoiding."""
TENTHS = QuotaGrid(percents=tuple(range(10, 101, 10)))


def plan_of(instance: Instance, cost: Cost | None = None, *, seconds: float = 5.0, **search: object) -> Plan:
    """Plans an instance with the exact search."""
    options = SearchOptions(limits=SearchLimits(seconds=seconds), **search)  # type: ignore[arg-type]
    cost = cost or TableCost(instance)
    return solve(
        instance.graph, cost, instance.device, num_devices=instance.num_devices, method="exact", search=options
    )


def worth_of_parts(*, seeds: int, num_modules: int) -> Iterator[Figure]:
    """What a plan loses without a part, or gains with it; per cent of the step, each sample one instance."""
    for shape in SHAPES:
        made = [
            generate(Recipe(shape=shape, num_modules=num_modules, num_slots=16, seed=seed)) for seed in range(seeds)
        ]
        yield from _of_shape(shape, made)


def _of_shape(shape: str, made: Sequence[Instance]) -> Iterator[Figure]:
    plans = [plan_of(one) for one in made]
    pairs = list(zip(made, plans, strict=True))

    def each(name: str, share: Callable[[Instance, Plan], float], paper: str = "") -> Figure:
        samples = [100 * share(one, plan) for one, plan in pairs]
        return figure(f"{name}, {shape}, mean, %", samples, "simulated", statistic=mean, paper=paper)

    yield each("lost with tenths of a device in place of slots", lambda i, p: _over(plan_of(i, grid=TENTHS), p))
    yield each("lost with the paper's sum in place of phases", lambda i, p: _over(plan_of(i, objective="sum"), p))
    yield each(
        "gained by starts that wait for inputs only, same plan",
        lambda i, p: 1 - simulate(p, i.graph).makespan_ms / p.predicted_ms,
    )
    yield each("lost to moving data between degrees", _moving)


def _over(plan: Plan, best: Plan) -> float:
    return plan.predicted_ms / best.predicted_ms - 1


def _moving(instance: Instance, plan: Plan) -> float:
    graph = replace(instance.graph, edges=tuple(replace(edge, num_bytes=EDGE_BYTES) for edge in instance.graph.edges))
    still = simulate(plan, graph)
    moved = simulate(plan, graph, StepModel(network=POD))
    return moved.makespan_ms / still.makespan_ms - 1


def held_memory(*, seeds: int, num_modules: int, seconds: float) -> Iterator[Figure]:
    """Memory that modules keep across stages, where it is tight: how often it rules a plan out, and what it costs."""
    proven, bound, lost = [], [], []
    for shape in SHAPES:
        for seed in range(seeds):
            one = generate(Recipe(shape=shape, num_modules=num_modules, tight_memory=True, held_memory=True, seed=seed))
            free, held = plan_of(one, seconds=seconds, hold_memory=False), plan_of(one, seconds=seconds)
            proven.append(float(held.search.status == "optimal"))
            lost.append(100 * _over(held, free))
            bound.append(float(lost[-1] > 1e-4))
    of = f"{num_modules} modules, 8 GPUs, memory held across stages and tight"
    yield figure(f"{of}: proven optimal, share of instances", proven, "measured", statistic=mean)
    yield figure(f"{of}: it rules out the best plan, share of instances", bound, "simulated", statistic=mean)
    yield figure(f"{of}: what it costs, mean, %", lost, "simulated", statistic=mean)


def replanning(
    *,
    problems: Iterable[tuple[int, int]],
    seeds: int,
    seconds: float,
    repeats: int = 2,
    shapes: Sequence[Shape] = SHAPES,
    is_whole: bool = True,
) -> Iterator[Figure]:
    """One module comes or goes: CPU time of a re-plan and of a cold solve, and what is lost by the shorter search.

    Of each the least of some repeats, in one process, with cost model and graph made beforehand and Python's garbage
    collector at rest.

    Args:
        problems: Numbers of modules and of GPUs.
        seeds: Instances of each shape.
        seconds: What a cold solve may take.
        repeats: Of each time.
        shapes: Of the graphs.
        is_whole: Whether the first, a middle and the last module come and go, or a middle one only.
    """
    gc.collect()
    for size, num_devices in problems:
        made = [
            generate(Recipe(shape=shape, num_modules=size, num_devices=num_devices, num_slots=16, seed=seed))
            for shape in shapes
            for seed in range(seeds)
        ]
        places = (0, size // 2, size - 1) if is_whole else (size // 2,)
        changes = [(whole, without(whole, whole.modules[at].name)) for whole in made for at in places]
        of = f"one of {size} modules comes or goes, {num_devices} GPUs"
        yield from _of_changes(of, [*changes, *((after, before) for before, after in changes)], seconds, repeats)


def _of_changes(
    of: str, changes: Iterable[tuple[Instance, Instance]], seconds: float, repeats: int
) -> Iterator[Figure]:
    colds, warms, lost, proven, gaps = [], [], [], [], []
    for before, after in changes:
        cold, cold_s = min((_timed(after, seconds) for _ in range(repeats)), key=lambda one: one[1])
        warm, warm_s = min((_replanned(before, after, seconds) for _ in range(repeats)), key=lambda one: one[1])
        colds.append(1000 * cold_s)
        warms.append(1000 * warm_s)
        lost.append(100 * _over(warm, cold))
        gaps.append(100 * (warm.predicted_ms / warm.search.bound_ms - 1))
        proven.append(float(warm.search.status == "optimal"))
    ratios = [warm / cold for warm, cold in zip(warms, colds, strict=True)]
    yield figure(f"{of}: re-plan over cold solve, median", ratios, "measured", paper="goal 0.1")
    if long := [ratio for ratio, cold in zip(ratios, colds, strict=True) if cold > LONG_MS]:
        name = f"{of}, where a cold solve takes over {LONG_MS:g} ms: re-plan over cold solve, median"
        yield figure(name, long, "measured")
    yield figure(f"{of}: cold solve, median, ms of CPU", colds, "measured")
    yield figure(f"{of}: re-plan, median, ms of CPU", warms, "measured")
    yield figure(f"{of}: re-plan, worst, ms of CPU", warms, "measured", statistic=max)
    yield figure(f"{of}: re-plans proven optimal, share", proven, "measured", statistic=mean)
    yield figure(f"{of}: re-plan's step over its bound, median, %", gaps, "simulated")
    yield figure(f"{of}: re-plan's step over the cold plan's, mean, %", lost, "simulated", statistic=mean)
    yield figure(f"{of}: re-plan's step over the cold plan's, worst, %", lost, "simulated", statistic=max)


def without(instance: Instance, name: str) -> Instance:
    """An instance without one module; what waited for it waits for what it waited for."""
    (gone,) = [module for module in instance.modules if module.name == name]
    modules = []
    for module in instance.modules:
        if module.name == name:
            continue
        if name in module.after:
            after = dict.fromkeys([*(other for other in module.after if other != name), *gone.after])
            module = replace(module, after=tuple(after))
        modules.append(module)
    kept = tuple(one for one in instance.disturbances if name not in (one.module, one.beside))
    return replace(instance, modules=tuple(modules), disturbances=kept)


def _timed(instance: Instance, seconds: float) -> tuple[Plan, float]:
    cost, _ = TableCost(instance), instance.graph
    return _cpu(lambda: plan_of(instance, cost, seconds=seconds))


def _replanned(before: Instance, after: Instance, seconds: float) -> tuple[Plan, float]:
    search = SearchOptions(limits=SearchLimits(seconds=seconds))
    planner = Replanner(device=before.device, num_devices=before.num_devices, search=search)
    planner.update(before.graph, TableCost(before))
    cost, graph = TableCost(after), after.graph
    return _cpu(lambda: planner.update(graph, cost))


def _cpu(work: Callable[[], Plan]) -> tuple[Plan, float]:
    gc.disable()
    try:
        began = time.process_time()
        plan = work()
        return plan, time.process_time() - began
    finally:
        gc.enable()
