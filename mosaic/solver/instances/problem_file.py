"""From an instance to an answer that can be kept as JSON, as `mosaic solve` prints it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from mosaic.device import FORBID_EXTRA
from mosaic.errors import InfeasibleError
from mosaic.plan import Plan
from mosaic.solver.exact.search import SearchHint, SearchLimits
from mosaic.solver.instances.checker import ROUNDING, check_plan
from mosaic.solver.instances.instance import Instance
from mosaic.solver.instances.instance_cost import TableCost
from mosaic.solver.replan.replanner import start_from
from mosaic.solver.solve import solve_with_hint
from mosaic.solver.task import SearchOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of solving an instance."""

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
    instance: str
    """Name of the instance."""
    method: str
    """Who was asked."""
    status: Literal["optimal", "feasible", "infeasible"]
    """Whether it was proven that no plan takes less; infeasible: there is no plan at all."""
    objective_ms: float | None
    """What the plan takes, in milliseconds, as the checker has it; None where there is no plan."""
    bound_ms: float | None
    """No plan takes less, in milliseconds; None where the method gives no bound."""
    seconds: float
    """Wall time."""
    reasons: tuple[str, ...] = ()
    """Why there is no plan."""
    plan: Plan | None = None
    """The plan."""


def solve_instance(
    instance: Instance,
    *,
    method: str = "exact",
    time_limit: float = 10.0,
    seed: int = 0,
    earlier: Plan | None = None,
    search: SearchOptions | None = None,
) -> tuple[Answer, InfeasibleError | None]:
    """Plans an instance and checks the plan.

    Args:
        instance: What to plan.
        method: ``exact``; ``heuristic``, which is where ``exact`` starts, with the bound of its start; another one of
            ``solve``; or a planner that Mosaic is compared with, whose waves hold whole modules here.
        time_limit: Seconds of wall clock. 0 gives the sequential plan at once, whatever the method. ``gahc`` and
            ``brute_force`` know no other limit: they end when they are done.
        seed: Of the windows that are drawn at random.
        earlier: A plan of an instance that has modules in common with this one: ``exact`` and ``heuristic`` start from
            its stages.
        search: Granularity and ablations of ``gahc``; the limits in it are not asked.

    Returns:
        The answer, and the error behind an answer without a plan.

    Raises:
        ValueError: More than 64 modules for the exact search, a time limit below 0, an earlier plan or granularity for
            a method that cannot use it, and what ``solve`` refuses.
    """
    _check_asked(method, time_limit, earlier, search)
    began = time.perf_counter()
    limits = SearchLimits(seconds=time_limit, seed=seed, exact=method != "heuristic")
    chosen = "exact" if method == "heuristic" or time_limit == 0 else method
    try:
        plan = _plan(instance, chosen, replace(search or SearchOptions(), limits=limits), earlier)
    except InfeasibleError as error:
        nothing = Answer(
            instance=instance.name,
            method=method,
            status="infeasible",
            objective_ms=None,
            bound_ms=None,
            seconds=time.perf_counter() - began,
            reasons=error.reasons,
        )
        return nothing, error
    verdict = check_plan(instance, plan)
    assert verdict.is_valid, f"the solver broke a rule of {instance.name}: {verdict.problems}"
    assert verdict.objective_ms is not None
    answer = Answer(
        instance=instance.name,
        method=method,
        status="optimal" if chosen == "brute_force" else plan.search.status,
        objective_ms=verdict.objective_ms,
        bound_ms=verdict.objective_ms if chosen == "brute_force" else _bound(plan, verdict.objective_ms),
        seconds=time.perf_counter() - began,
        plan=plan,
    )
    return answer, None


def _check_asked(method: str, time_limit: float, earlier: Plan | None, search: SearchOptions | None) -> None:
    if not time_limit >= 0:
        raise ValueError(f"time_limit={time_limit}; use 0 seconds or more")
    if earlier is not None and method not in ("exact", "heuristic"):
        raise ValueError(f"method={method!r} does not start from an earlier plan; use exact or heuristic, or no plan")
    if search is not None and method != "gahc":
        raise ValueError(f"granularity and ablations are those of method='gahc', not of {method!r}: leave them out")


def _plan(instance: Instance, method: str, search: SearchOptions, earlier: Plan | None) -> Plan:
    graph, cost, device, count = instance.graph, TableCost(instance), instance.device, instance.num_devices
    hint = SearchHint(start=start_from(earlier, graph)) if earlier is not None else None
    return solve_with_hint(graph, cost, device, num_devices=count, method=method, search=search, hint=hint)[0]


def _bound(plan: Plan, objective_ms: float) -> float | None:
    """Searches add up whole nanoseconds: a bound may be above the objective by what was rounded, and no more."""
    bound_ms = plan.search.bound_ms
    assert bound_ms <= objective_ms + ROUNDING * max(objective_ms, len(plan.stages)), (bound_ms, objective_ms)
    is_known = bound_ms > 0 or plan.search.status == "optimal"  # a plan of no time at all is proven best, too
    return min(bound_ms, objective_ms) if is_known else None
