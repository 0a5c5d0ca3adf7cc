"""Solves for a plan from a graph, a cost model and a device."""

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
    """Plans the stages, devices and slots of modules.

    Mosaic's own methods never return a plan that is predicted slower than the sequential one: a stage without gain is
    split into its modules. The same input gives the same plan, even if ``SearchLimits.effort`` ends the search, but not
    if its ``seconds`` do.

    Args:
        graph: Modules to place.
        cost: Times, memory and interference.
        device: One of the equal devices.
        num_devices: Number of devices.
        method: One of ``methods.METHODS``. ``auto`` is ``exact`` if it can plan this problem, otherwise ``gahc`` with a
            warning; the plan's record has the method.
        search: Granularity, limits and ablations.
        forbidden: Sets of modules that must not be stages, for ``exact``.

    Raises:
        InfeasibleError: A module does not fit on any device, or no plan fits into memory.
        UndecidedError: No plan was found that fits into memory, and it is not proven that none exists.
        ValueError: The method is unknown or cannot plan this problem, there are no devices, or the cost model returns a
            negative time.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}; use at least 1")
    planner = method_of(method)
    start = time.perf_counter()
    search = search or SearchOptions()
    options = all_options(graph, cost=cost, device=device, num_devices=num_devices, percents=search.percents)
    machine = Machine(num_devices=num_devices, num_slots=device.num_slots, memory_bytes=device.memory_bytes)
    order = graph.topological_order()
    in_turn = tuple(alone(name, options[name]) for name in order)
    is_held = search.hold_memory and keeps_anything(options, machine)
    if is_held:
        in_turn = place_stages(in_turn, machine) or place_in_turn(order, options, machine)
    seconds = max(0.0, search.limits.seconds - (time.perf_counter() - start))  # there may be a hundred thousand options
    task = Task(
        method=planner.name,
        graph=graph,
        options=options,
        cost=cost,
        machine=machine,
        in_turn=in_turn,
        is_held=is_held,
        search=replace(search, limits=replace(search.limits, seconds=seconds)),
        forbidden=forbidden,
    )
    answer = planner.plan(task)
    plan = Plan(
        device=device,
        num_devices=num_devices,
        stages=answer.stages,
        graph=graph.fingerprint,
        profile=cost.profile_fingerprint,
        sequential_ms=task.times.total_ms(in_turn),
        search=answer.record,
    )
    # the search rounds to nanoseconds, so its bound may exceed the plan in the last digits
    bound_ms = min(answer.record.bound_ms, plan.predicted_ms)
    plan = replace(plan, search=replace(answer.record, seconds=time.perf_counter() - start, bound_ms=bound_ms))
    plan.check_covers(graph)
    return plan
