"""A plan for the engine: by any method, with slots left to communication and its times in the plan."""

from __future__ import annotations

from mosaic.cost import Cost
from mosaic.cost.communication import RankedCost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.solver.methods import method_of
from mosaic.solver.predict import with_communication
from mosaic.solver.reserve import with_reserved, without_reserved
from mosaic.solver.shared_network import plan_for_shared_network
from mosaic.solver.solve import solve
from mosaic.solver.task import SearchOptions

DATA_PARALLEL = "data-parallel"
"""The method that needs no measured times: every module on all devices, one after the other."""


def check_method(method: str, plan: Plan | None = None) -> None:
    """Raises ValueError unless the method is known, and no plan makes it needless."""
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
    communication_slots: int = 0,
) -> Plan:
    """Plans by one method, with slots left to communication and its times in the plan.

    Modules stay whole, unless the settings of planners say how many layers they have; such a plan cannot run.

    Args:
        method: One of ``METHODS``. Where a network between several devices is known, ``auto`` chooses by a simulated
            step, in which modules share it (``shared_network.py``).
        graph: What to place.
        cost: Times, memory and interference.
        device: What one of the devices is.
        num_devices: How many of them.
        search: Granularity and limits of the solvers; its grid holds for ``sequential`` too.
        communication_slots: Slots of each device that no module gets; see ``reserve.py``.

    Raises:
        InfeasibleError: A module fits on no device, or there is no plan that devices hold.
        ValueError: There is no such method, no device, nothing left beside what is reserved, or the method cannot
            search this problem.
    """
    left = without_reserved(device, communication_slots)
    if method == "auto" and num_devices > 1 and isinstance(cost, RankedCost):
        plan = plan_for_shared_network(graph, cost, left, num_devices=num_devices, search=search)
    else:
        plan = solve(graph, cost, left, num_devices=num_devices, method=method, search=search)
        plan = with_communication(plan, cost) if isinstance(cost, RankedCost) else plan
    return with_reserved(plan, device, communication_slots)
