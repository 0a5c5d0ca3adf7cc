"""Every planner on the same graph, devices and cost model: what ``mosaic plan --compare`` prints.

All times are predicted by that one cost model; nothing is measured here. The order of the planners differs from
input to input. A schedule that slices modules (Spindle's) may be predicted to beat the best plan of whole modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.errors import BackendUnavailableError, InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.solver.options import all_options
from mosaic.solver.planners import PLANNERS, PlannerSettings, WavePlan, plan_with
from mosaic.solver.solve import METHODS, SearchOptions, solve

COMPARED = (*PLANNERS, "gahc", "exact")
"""Planners and solvers that are compared unless others are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one planner made of it, or why it could not."""

    method: str
    """Name of the planner or solver."""
    plan: Plan | WavePlan | None = None
    """What it answers; None where it could not."""
    reason: str = ""
    """Why it could not; empty where it could."""
    ratio: float | None = None
    """Its predicted time over the least of all that were compared; 1 for the best. None where it could not,
    or where the best takes no time."""
    seconds: float = 0.0
    """Wall time of planning."""

    @property
    def predicted_ms(self) -> float | None:
        """Predicted time of a step's modules, in milliseconds; None where it could not."""
        return None if self.plan is None else self.plan.predicted_ms

    @property
    def num_waves(self) -> int:
        """Stages or waves, one after the other; 0 where it could not."""
        if self.plan is None:
            return 0
        return len(self.plan.waves if isinstance(self.plan, WavePlan) else self.plan.stages)

    @property
    def sliced(self) -> tuple[str, ...]:
        """Modules that it cuts into several parts."""
        return self.plan.sliced if isinstance(self.plan, WavePlan) else ()

    @property
    def is_runnable(self) -> bool:
        """Whether it is a plan that can be run, or can be turned into one by ``WavePlan.as_plan``."""
        return self.plan is not None and (isinstance(self.plan, Plan) or self.plan.is_runnable)

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        """Whether it was proven that no plan of whole modules on these quotas is predicted faster."""
        return "feasible" if self.plan is None else self.plan.search.status

    @property
    def bound_ms(self) -> float:
        """No plan of whole modules is predicted to take less, in milliseconds; 0 where it gives no bound."""
        return 0.0 if self.plan is None else self.plan.search.bound_ms


def compare(
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int = 1,
    methods: Sequence[str] = COMPARED,
    search: SearchOptions | None = None,
    settings: PlannerSettings | None = None,
) -> tuple[Comparison, ...]:
    """Plans with every method in turn; a method that cannot do it is listed with its reason.

    Args:
        graph: What to place.
        cost: Times, memory and interference, the same for all.
        device: What one of the devices is.
        num_devices: How many of them.
        methods: Names from ``PLANNERS`` and ``METHODS``, each once.
        search: Granularity and limits of the solvers; its grid holds for ``sequential`` too.
        settings: Granularity of Spindle's slices, and variants.

    Returns:
        One entry for each method, in their order.

    Raises:
        InfeasibleError: A module fits on no device, whoever plans.
        ValueError: There are no devices, a method is unknown or named twice, or the cost model gives a negative time.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}; a plan needs at least one device")
    known = (*PLANNERS, *(method for method in METHODS if method not in PLANNERS))
    if not methods or not set(methods) <= set(known) or len(set(methods)) < len(methods):
        raise ValueError(f"methods={tuple(methods)}; name each once, at least one of {', '.join(known)}")
    search = search or SearchOptions()
    settings = settings or PlannerSettings()
    settings = replace(settings, hold_memory=settings.hold_memory and search.hold_memory)
    all_options(graph, cost=cost, device=device, num_devices=num_devices, grid=search.grid)  # what none could do

    def plan(method: str) -> Plan | WavePlan:
        if method in PLANNERS:
            return plan_with(method, graph, cost, device, num_devices=num_devices, grid=search.grid, settings=settings)
        return solve(graph, cost, device, num_devices=num_devices, method=method, search=search)

    return _with_ratios([_attempt(method, plan) for method in methods])


def _attempt(method: str, plan: Callable[[str], Plan | WavePlan]) -> Comparison:
    began = time.perf_counter()
    try:
        found, reason = plan(method), ""
    except (BackendUnavailableError, InfeasibleError, UndecidedError, ValueError) as error:
        found, reason = None, str(error)
    return Comparison(method=method, plan=found, reason=reason, seconds=time.perf_counter() - began)


def _with_ratios(found: Sequence[Comparison]) -> tuple[Comparison, ...]:
    best = min((one.predicted_ms for one in found if one.predicted_ms is not None), default=0.0)
    return tuple(
        replace(one, ratio=one.predicted_ms / best if best > 0 else None) if one.predicted_ms is not None else one
        for one in found
    )
