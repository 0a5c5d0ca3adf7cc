"""A plan that can be run from any method: the solvers, and the planners that Mosaic is compared with.

What becomes of a comparison planner's answer. ``sequential``, ``megatron``, ``distmm``, ``distmm-waves`` and
``spindle-optimus`` keep modules whole: each of their waves is a stage. Spindle slices MetaOps between operators, and a
plan holds whole modules, so a module counts as one operator here. Where a model's layers are placed as modules
(``modules=["vision.layers.*", ...]``), chains of equal ones are what Spindle contracts and slices, and the plan has the
slices. Waves end with a barrier in a prediction and with none when they run: a module starts when its inputs are there.
"""

from __future__ import annotations

from dataclasses import replace

from mosaic.cost import Cost
from mosaic.cost.communication.ranked import RankedCost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Placement, Plan, Stage
from mosaic.solver.planners import PLANNERS, PlannerSettings, plan_with
from mosaic.solver.reserve import CommunicationSlots, Reserved
from mosaic.solver.solve import METHODS, SearchOptions, solve

RUNNABLE = (*METHODS, *(name for name in PLANNERS if name not in METHODS))
"""Methods whose plans can be run, by name."""


def check_method(method: str, plan: Plan | None = None) -> None:
    """Raises ValueError unless there is a solver or planner of that name, and no plan that makes it needless."""
    if method not in RUNNABLE:
        raise ValueError(f"method={method!r} is no solver and no planner; use one of {', '.join(RUNNABLE)}")
    if plan is not None and method != "auto":
        raise ValueError(f"a plan and method={method!r} were given; a plan runs as it is: leave one of them out")


def plan_to_run(
    method: str,
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int = 1,
    search: SearchOptions | None = None,
    communication_slots: CommunicationSlots = 0,
) -> Plan:
    """Plans by one method, so that the plan can be run.

    Args:
        method: One of ``RUNNABLE``.
        graph: What to place.
        cost: Times, memory and interference.
        device: What one of the devices is.
        num_devices: How many of them.
        search: Granularity and limits of the solvers; its grid holds for ``sequential`` too.
        communication_slots: Slots of each device that no module gets, or ``remainder``; see ``reserve``.

    Raises:
        InfeasibleError: A module fits on no device, or there is no plan that devices hold.
        ValueError: There is no such method, no device, nothing left beside what is reserved, or the method cannot
            search this problem.
    """
    check_method(method)
    whole, reserved = device, Reserved.of(device, communication_slots)
    device = reserved.left_of(whole)
    if method in METHODS:
        plan = solve(graph, cost, device, num_devices=num_devices, method=method, search=search)
    else:
        settings = PlannerSettings(default_operators=1)
        grid = search.grid if search is not None else None
        waves = plan_with(method, graph, cost, device, num_devices=num_devices, grid=grid, settings=settings)
        plan = waves.as_plan(graph)
    plan = reserved.told(plan, whole)
    return with_communication(plan, cost) if isinstance(cost, RankedCost) else plan


def with_communication(plan: Plan, cost: RankedCost) -> Plan:
    """Returns a plan that says which part of its times is communication; the times have it already."""

    def told(placed: Placement) -> Placement:
        found = cost.communication(placed.module, placed.degree, placed.quota)
        return replace(
            placed,
            route_forward_ms=found.route_forward_ms,
            route_backward_ms=found.route_backward_ms,
            reduce_ms=found.reduce_ms,
        )

    stages = tuple(Stage(placements=tuple(map(told, stage.placements))) for stage in plan.stages)
    return replace(plan, stages=stages)
