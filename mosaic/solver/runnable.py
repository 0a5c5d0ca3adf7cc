"""A plan for the engine: by any method, with slots left to communication and its times in the plan.

A collective on a GPU is a kernel: NCCL runs a CTA for each channel, and each occupies an SM while it runs. Held to a
number of CTAs (``max_ctas`` of its communicator) on a device with as many SMs that no module has, it takes none of
theirs. A reserved slot includes the SMs that the split into slots leaves over: of a Hopper device's 132 SMs, 16 slots
of 8, that is 4.
"""

from __future__ import annotations

from dataclasses import replace

from mosaic.cost import Cost
from mosaic.cost.communication import RankedCost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.solver.methods import method_of
from mosaic.solver.predict import with_communication
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
        communication_slots: Slots of each device that no module gets.

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


def without_reserved(device: Device, slots: int) -> Device:
    """Returns the device that modules are planned for: without its last ``slots`` slots.

    Raises:
        ValueError: No slot is left for modules.
    """
    if not 0 <= slots < device.num_slots:
        raise ValueError(
            f"communication_slots={slots} of {device.num_slots} slots of {device.name}; modules need at least one of "
            "them, and none may be negative"
        )
    return replace(device, num_slots=device.num_slots - slots) if slots else device


def with_reserved(plan: Plan, device: Device, slots: int) -> Plan:
    """Returns a plan for the device without reserved slots as one for the whole device that reserves them."""
    sms = slots * device.sms_per_slot + device.remainder_sms if slots else 0
    return replace(plan, device=device, communication_slots=slots, communication_sms=sms)
