"""From a graph, a cost model and a device to a plan."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.solver.held_memory import keeps_anything, place_in_turn, place_stages
from mosaic.solver.methods import method_of
from mosaic.solver.options import all_options
from mosaic.solver.stage import Machine, alone
from mosaic.solver.task import SearchOptions, Task


def solve(
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int = 1,
    method: str = "auto",
    search: SearchOptions | None = None,
    forbidden: Sequence[Collection[str]] = (),
) -> Plan:
    """Plans which modules run side by side, and on which slots of which devices.

    The plan of Mosaic's own methods is never predicted slower than the sequential one: a stage that brings nothing is
    split into its modules. The same input gives the same plan, also where ``SearchLimits.effort`` ends the
    search; what its ``seconds`` end depends on the machine.

    Args:
        graph: What to place.
        cost: Times, memory and interference.
        device: What one of the devices is.
        num_devices: How many of them.
        method: One of ``methods.METHODS``. ``auto`` takes ``exact`` where it can search this problem, otherwise
            ``gahc`` with a warning that says why; the plan's record has the method that was used.
        search: Granularity, limits and ablations.
        forbidden: Sets of modules that ``exact`` makes no stages of.

    Raises:
        InfeasibleError: There is no plan: a module fits on no device (names it, what it needs and what there is), or
            devices do not hold what all modules keep.
        UndecidedError: No plan was found that devices hold, and it is not proven that there is none.
        ValueError: There are no devices, no such method, the method cannot search this problem, or the cost model
            gives a negative time.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}; a plan needs at least one device")
    chosen = method_of(method)
    began = time.perf_counter()
    search = search or SearchOptions()
    options = all_options(graph, cost=cost, device=device, num_devices=num_devices, percents=search.percents)
    machine = Machine(num_devices=num_devices, num_slots=device.num_slots, memory_bytes=device.memory_bytes)
    order = graph.topological_order()
    in_turn = tuple(alone(name, options[name]) for name in order)
    is_held = search.hold_memory and keeps_anything(options, machine)
    if is_held:
        in_turn = place_stages(in_turn, machine) or place_in_turn(order, options, machine)
    left = max(0.0, search.limits.seconds - (time.perf_counter() - began))  # options may be a hundred thousand
    task = Task(
        method=chosen.name,
        graph=graph,
        options=options,
        cost=cost,
        machine=machine,
        in_turn=in_turn,
        is_held=is_held,
        search=replace(search, limits=replace(search.limits, seconds=left)),
        forbidden=forbidden,
    )
    answer = chosen.plan(task)
    plan = Plan(
        device=device,
        num_devices=num_devices,
        stages=answer.stages,
        graph=graph.fingerprint,
        profile=cost.profile_fingerprint,
        sequential_ms=task.times.total_ms(in_turn),
        search=answer.record,
    )
    # The search counts whole nanoseconds, a plan does not: its bound may be above the plan in the last digits.
    bound_ms = min(answer.record.bound_ms, plan.predicted_ms)
    plan = replace(plan, search=replace(answer.record, seconds=time.perf_counter() - began, bound_ms=bound_ms))
    plan.check_covers(graph)
    return plan
