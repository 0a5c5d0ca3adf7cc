"""A plan for the engine: by any method, with slots left to communication, and told what its communication takes.

Every method keeps modules whole here, unless the settings of planners say how many layers they have; such a plan can be
simulated and not run. Where a model's layers are placed as modules
(``modules=["vision.layers.*", ...]``), chains of equal ones are what Spindle contracts and slices.
"""

from __future__ import annotations

from mosaic.cost import Cost
from mosaic.cost.communication import RankedCost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.solver.exact.search import SearchHint
from mosaic.solver.methods import method_of
from mosaic.solver.predict import with_communication
from mosaic.solver.reserve import CommunicationSlots, Reserved
from mosaic.solver.shared_network import plan_for_shared_network
from mosaic.solver.solve import find_solution
from mosaic.solver.task import SearchOptions

DATA_PARALLEL = "data-parallel"
"""The method of several ranks that measures nothing: every module on all of them, one after the other."""


def check_method(method: str, plan: Plan | None = None) -> None:
    """Raises ValueError unless there is a method of that name, and no plan that makes it needless."""
    if method != DATA_PARALLEL:
        method_of(method)
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
    hint: SearchHint | None = None,
) -> Plan:
    """Plans by one method, so that the plan can be run.

    Args:
        method: One of ``METHODS``. Where a network between several devices is known, ``auto`` chooses by a simulated
            step, in which modules share it (``shared_network.py``).
        graph: What to place.
        cost: Times, memory and interference.
        device: What one of the devices is.
        num_devices: How many of them.
        search: Granularity and limits of the solvers; its grid holds for ``sequential`` too.
        communication_slots: Slots of each device that no module gets, or ``remainder``; see ``reserve``.
        hint: What an exact search starts from.

    Raises:
        InfeasibleError: A module fits on no device, or there is no plan that devices hold.
        ValueError: There is no such method, or it takes no hint; no device, nothing left beside what is
            reserved, or the method cannot search this problem.
    """
    whole, reserved = device, Reserved.of(device, communication_slots)
    device = reserved.left_of(whole)
    if hint is not None and not method_of(method).starts_from_plan:
        raise ValueError(f"method={method!r} does not start from an earlier plan; use exact, or no plan")
    if method == "auto" and num_devices > 1 and isinstance(cost, RankedCost):
        plan = plan_for_shared_network(graph, cost, device, num_devices=num_devices, search=search, hint=hint)
        return reserved.told(plan, whole)
    plan = find_solution(graph, cost, device, num_devices=num_devices, method=method, search=search, hint=hint).plan
    plan = reserved.told(plan, whole)
    return with_communication(plan, cost) if isinstance(cost, RankedCost) else plan
