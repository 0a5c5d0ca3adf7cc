"""Which plans are worth trying in the loop, and the plan made again from what was measured there."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import replace

from mosaic.cost import Cost
from mosaic.errors import InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.solver import solve
from mosaic.solver.exact import why_not_exact
from mosaic.solver.feedback import MeasuredTimes, with_measured
from mosaic.solver.limits import SearchLimits
from mosaic.solver.task import SearchOptions
from mosaic.timeline import Span

_EFFORT = 1.0
"""Most effort for one more search; what it found by then counts."""


def plan_shape(plan: Plan) -> Hashable:
    """Returns what decides how a plan runs: stages, and the slots of each module."""
    return tuple(tuple((p.module, p.cells) for p in stage.placements) for stage in plan.stages)


def name_of(plan: Plan) -> str:
    """Says which modules run side by side on how many slots, stage after stage."""
    if not plan.is_colocated:
        quotas = ", ".join(f"{p.module}:{p.quota}" for p in plan.placements)
        return f"one module after the other on lanes ({quotas})"
    return " | ".join(" + ".join(f"{p.module}:{p.quota}" for p in stage.placements) for stage in plan.stages)


def plans_to_try(best: Plan, graph: ModuleGraph, cost: Cost, *, count: int, smallest_gain: float) -> tuple[Plan, ...]:
    """Returns the best plan, the next best that have other stages, and the sequential one last; all different.

    Of each colocated stage of the best plan there is one candidate without it. Plans whose predicted speed-up is below
    ``smallest_gain`` are left out, except for the sequential one; if that leaves none, there is nothing to try.
    """
    if best.predicted_speedup < smallest_gain:
        return ()
    device, others = best.device, []
    if why_not_exact(graph, cost) is None and count > 2:
        for stage in best.stages:
            if len(stage.placements) > 1:
                with suppress(InfeasibleError):  # there is no plan without this stage
                    search = SearchOptions(limits=SearchLimits(effort=_EFFORT))
                    others.append(solve(graph, cost, device, method="exact", search=search, forbidden=[stage.names]))
    sequential = solve(graph, cost, device, method="sequential")
    close = [
        plan for plan in sorted(others, key=lambda one: one.predicted_ms) if plan.predicted_speedup >= smallest_gain
    ]
    chosen: dict[Hashable, Plan] = {}
    for plan in (best, *close):
        chosen.setdefault(plan_shape(plan), plan)
    kept = list(chosen.values())[: max(1, count - 1)]
    return (*kept, sequential)[:count]


def measured_of(spans: Iterable[Span]) -> MeasuredTimes:
    """Returns the median time of each module's phases, in milliseconds."""
    times: dict[tuple[str, Phase], list[float]] = {}
    for span in spans:
        if span.phase != "glue":
            times.setdefault((span.module, Phase(span.phase)), []).append(span.end_ms - span.start_ms)
    return {key: statistics.median(values) for key, values in times.items()}


def solve_again(plan: Plan, measured: MeasuredTimes, graph: ModuleGraph, cost: Cost) -> tuple[Plan, Cost] | None:
    """Corrects the cost model by what a plan was measured to take, and plans with it; None where that takes long."""
    known = {module: time_ms for module, time_ms in measured.items() if module[0] in graph.names}
    corrected = with_measured(cost, plan, known)
    if why_not_exact(graph, corrected) is not None:
        return None
    search = replace(SearchOptions(), limits=SearchLimits(effort=_EFFORT))
    return solve(graph, corrected, plan.device, search=search), corrected
