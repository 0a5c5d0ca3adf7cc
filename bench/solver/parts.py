"""The worth of each part of the formulation: plans with and without it, on the same instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from mosaic.solver.instance import Instance, TableCost
from mosaic.solver.limits import SearchLimits

SHAPES: tuple[Shape, ...] = ("star", "layered", "multi", "align")
EDGE_BYTES = 32 * 512 * 4096 * 2
"""Of a batch between two modules: 32 samples of 512 tokens of 4096 bf16 numbers."""
TENTHS = QuotaGrid(percents=tuple(range(10, 101, 10)))


def plan_of(instance: Instance, cost: Cost | None = None, *, seconds: float = 5.0, **search: object) -> Plan:
    """Plans an instance with the exact search."""
    options = SearchOptions(limits=SearchLimits(effort=seconds), **search)  # type: ignore[arg-type]
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

    def each(name: str, share: Callable[[Instance, Plan], float]) -> Figure:
        samples = [100 * share(one, plan) for one, plan in pairs]
        return figure(f"{name}, {shape}, mean, %", samples, "simulated", statistic=mean)

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


def held_memory(*, seeds: int, sizes: Sequence[int], seconds: float) -> Iterator[Figure]:
    """Memory that modules keep across stages, where it is tight: how sure plans are, and what it costs."""
    for num_modules in sizes:
        proven, gaps, bound, lost = [], [], [], []
        for shape in SHAPES:
            for seed in range(seeds):
                recipe = Recipe(shape=shape, num_modules=num_modules, tight_memory=True, held_memory=True, seed=seed)
                one = generate(recipe)
                free, held = plan_of(one, seconds=seconds, hold_memory=False), plan_of(one, seconds=seconds)
                proven.append(float(held.search.status == "optimal"))
                gaps.append(_gap(held))
                lost.append(100 * _over(held, free))
                bound.append(float(lost[-1] > 1e-4))
        of = f"{num_modules} modules, 8 GPUs, memory held across stages and tight, {seconds:g} s"
        yield figure(f"{of}: proven optimal, share of instances", proven, "measured", statistic=mean)
        yield figure(f"{of}: step over its bound, mean, %", gaps, "simulated", statistic=mean)
        yield figure(f"{of}: step over its bound, worst, %", gaps, "simulated", statistic=max)
        yield figure(f"{of}: it rules out the best plan, share of instances", bound, "simulated", statistic=mean)
        yield figure(f"{of}: what it costs, mean, %", lost, "simulated", statistic=mean)


def _gap(plan: Plan) -> float:
    return 100 * (plan.predicted_ms / plan.search.bound_ms - 1)
