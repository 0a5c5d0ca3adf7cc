"""Every method on the same graph, devices and cost model: what ``mosaic plan --compare`` prints.

All times are predicted by that one cost model; nothing is measured here. The order of the planners differs from
input to input. A plan that slices modules (Spindle's) may be predicted to beat the best plan of whole modules.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.errors import BackendUnavailableError, InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.solver.methods import METHODS, compared_methods
from mosaic.solver.options import all_options
from mosaic.solver.solve import solve
from mosaic.solver.task import PlannerSettings, SearchOptions

COMPARED_PLANNERS = PlannerSettings(default_layers=12)
"""Where nobody sets the planners: Spindle slices every module between 12 layers."""

Outcome = Literal["optimal", "feasible", "infeasible", "not found", "refused"]
"""How it ended: a plan that is proven best of whole modules, or one that is not; proven to have no plan; no plan found,
which proves nothing; or a problem that the method does not take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one method made of it, or why it could not."""

    method: str
    """Name of the planner or solver."""
    plan: Plan | None = None
    """What it answers; None where it could not."""
    predicted_ms: float | None = None
    """Predicted time of a step's modules, in milliseconds; None where it could not."""
    status: Outcome
    """How it ended."""
    reason: str = ""
    """Why it could not; empty where it could."""
    ratio: float | None = None
    """Its predicted time over the least of all that were compared; 1 for the best. None where it could not,
    or where the best takes no time."""
    seconds: float = 0.0
    """Wall time of planning."""

    @property
    def num_stages(self) -> int:
        """Stages, one after the other; 0 where it could not."""
        return 0 if self.plan is None else len(self.plan.stages)

    @property
    def sliced(self) -> tuple[str, ...]:
        """Modules that it cuts into several parts."""
        return () if self.plan is None else self.plan.sliced

    @property
    def is_runnable(self) -> bool:
        """Whether its plan can be run: it keeps modules whole."""
        return self.plan is not None and not self.sliced

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
    methods: Sequence[str] | None = None,
    search: SearchOptions | None = None,
) -> tuple[Comparison, ...]:
    """Plans with every method in turn; a method that cannot do it is listed with its reason.

    Args:
        graph: What to place.
        cost: Times, memory and interference, the same for all.
        device: What one of the devices is.
        num_devices: How many of them.
        methods: Names from ``METHODS``, each once; by default those that the table says are compared.
        search: Granularity and limits; ``COMPARED_PLANNERS`` where it says nothing of planners.

    Returns:
        One entry for each method, in their order.

    Raises:
        InfeasibleError: A module fits on no device, whoever plans.
        ValueError: There are no devices, a method is unknown or named twice, or the cost model gives a negative time.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}; a plan needs at least one device")
    methods = compared_methods() if methods is None else methods
    if not methods or set(methods) - set(METHODS) or len(set(methods)) < len(methods):
        raise ValueError(f"methods={tuple(methods)}; name each once, at least one of {', '.join(METHODS)}")
    search = search or SearchOptions()
    if search.planners == PlannerSettings():
        search = replace(search, planners=COMPARED_PLANNERS)
    all_options(graph, cost=cost, device=device, num_devices=num_devices, grid=search.grid)  # what none could do
    rows = []
    for method in methods:
        began = time.perf_counter()
        try:
            plan = solve(graph, cost, device, num_devices=num_devices, method=method, search=search)
        except (BackendUnavailableError, InfeasibleError, UndecidedError, ValueError) as error:
            row = Comparison(method=method, status=_outcome_of(error), reason=str(error))
        else:
            row = Comparison(method=method, plan=plan, status=plan.search.status, predicted_ms=plan.predicted_ms)
        rows.append(replace(row, seconds=time.perf_counter() - began))
    best = min((row.predicted_ms for row in rows if row.predicted_ms is not None), default=0.0)
    return tuple(
        replace(row, ratio=row.predicted_ms / best if best > 0 else None) if row.predicted_ms is not None else row
        for row in rows
    )


def _outcome_of(error: Exception) -> Outcome:
    if isinstance(error, InfeasibleError):
        return "infeasible"
    return "not found" if isinstance(error, UndecidedError) else "refused"
