"""Every partition, every option, every placement: the truth for small inputs, and what tests compare with.

Nothing is shared with the search that it judges except the options. It minimises what a plan predicts
(``Plan.predicted_ms``): forward and backward each with its own maximum, with all interference.

A partition in an order that respects the dependencies is a chain of ever larger sets of finished modules, each closed
under predecessors. A set is reached in many ways: by time and, where devices hold what modules keep, by what each
device keeps and the most that one stage works with on it. Only a way that is no better in any of these is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.errors import InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, SearchRecord
from mosaic.profile import Phase
from mosaic.solver.held_memory import keeps_anything
from mosaic.solver.options import NS_PER_MS, DeploymentOption, all_options
from mosaic.solver.predict import PlacedTimes, build_stages
from mosaic.solver.stage import Choice, Machine, StageResult
from mosaic.solver.task import SearchOptions

MAX_MODULES = 6
MAX_DEVICES = 2


_Options = Mapping[str, Sequence[DeploymentOption]]
_Loads = tuple[tuple[int, int], ...]
"""Of each device: kept bytes, and the most that one stage works with."""
_Way = tuple[float, _Loads, tuple[StageResult, ...]]


def best_stages(
    graph: ModuleGraph, options: _Options, *, cost: Cost, machine: Machine, is_held: bool
) -> tuple[StageResult, ...]:
    """Returns the stages with the least predicted time over all ordered partitions.

    Raises:
        InfeasibleError: Devices cannot hold what all modules keep.
    """
    stages: dict[tuple[str, ...], list[_Way]] = {}
    ways: dict[frozenset[str], list[_Way]] = {frozenset(): [(0.0, ((0, 0),) * machine.num_devices, ())]}
    for done, names in _steps(graph, machine):
        if names not in stages:
            stages[names] = (_held_ways if is_held else _best_way)(names, options, cost, machine)
        for way in ways.get(done, []):
            for stage in stages[names]:
                _keep(ways.setdefault(done | set(names), []), _joined(way, stage), machine)
    complete = ways.get(frozenset(graph.names), [])
    if not complete:
        raise InfeasibleError("no plan fits into the devices' memory", reasons=["all were tried"])
    return min(complete, key=lambda way: way[0])[2]


def _steps(graph: ModuleGraph, machine: Machine) -> Iterator[tuple[frozenset[str], tuple[str, ...]]]:
    """Sets of finished modules, smaller ones first, each with every stage that may come next."""
    assert len(graph.names) <= MAX_MODULES
    assert machine.num_devices <= MAX_DEVICES
    order = graph.topological_order()
    needs = {name: frozenset(graph.predecessors(name)) for name in order}
    for done in _subsets(order):
        if all(needs[name] <= set(done) for name in done):
            ready = [name for name in order if name not in done and needs[name] <= set(done)]
            for names in _subsets(ready):
                if names:
                    yield frozenset(done), names


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from combinations(names, size)


def best_stage(
    names: Sequence[str], options: _Options, *, cost: Cost, machine: Machine, by_sum: bool = False
) -> tuple[float, StageResult] | None:
    """Returns the least time of one stage and its allocation, or None where its modules do not fit side by side.

    ``by_sum`` minimises the slowest module's forward and backward together (the paper's Eq. 4), instead of the sum
    of the slowest forward and the slowest backward.
    """
    best_ms, best = math.inf, None
    limit = machine.memory_bytes or math.inf

    def descend(chosen: dict[str, Choice], slots: list[int], memory: list[int]) -> None:
        """Adds one module in every way; interference never helps, so a partial value is a lower bound."""
        nonlocal best_ms, best
        value_ms = _time_ms(chosen, cost, by_sum=by_sum)
        if value_ms >= best_ms:
            return
        if len(chosen) == len(names):
            best_ms, best = value_ms, chosen
            return
        name = names[len(chosen)]
        for option in sorted(options[name], key=lambda o: (o.latency_ns, o)):
            for devices in combinations(range(machine.num_devices), option.degree):
                more_slots = [s + option.quota * (g in devices) for g, s in enumerate(slots)]
                more_memory = [m + option.memory_bytes * (g in devices) for g, m in enumerate(memory)]
                if max(more_slots) <= machine.num_slots and max(more_memory) <= limit:
                    descend({**chosen, name: (option, devices)}, more_slots, more_memory)

    descend({}, [0] * machine.num_devices, [0] * machine.num_devices)
    if best is None:
        return None
    return best_ms, StageResult(latency_ns=round(best_ms * NS_PER_MS), choices=best)


def _time_ms(chosen: Mapping[str, Choice], cost: Cost, *, by_sum: bool = False) -> float:
    """Time of a stage: slowest forward plus slowest backward, or the slowest module's two together."""
    result = StageResult(latency_ns=0, choices=chosen)
    forwards, backwards, sums = [0.0], [0.0], [0.0]
    for name, (option, devices) in chosen.items():
        for device in devices:
            beside = result.beside(name, device)
            forward, backward = (
                cost.placed_ms(name, phase, option.degree, option.quota, beside=beside) for phase in Phase
            )
            forwards.append(forward)
            backwards.append(backward)
            sums.append(forward + backward)
    return max(sums) if by_sum else max(forwards) + max(backwards)


def _joined(way: _Way, stage: _Way) -> _Way:
    loads = tuple((a[0] + b[0], max(a[1], b[1])) for a, b in zip(way[1], stage[1], strict=True))
    return way[0] + stage[0], loads, (*way[2], *stage[2])


def _keep(ways: list[_Way], new: _Way, machine: Machine) -> None:
    if any(kept + working > machine.memory_bytes for kept, working in new[1]) or any(_beats(w, new) for w in ways):
        return
    ways[:] = [way for way in ways if not _beats(new, way)]
    ways.append(new)


def _beats(first: _Way, second: _Way) -> bool:
    return first[0] <= second[0] and all(
        a[0] <= b[0] and a[1] <= b[1] for a, b in zip(first[1], second[1], strict=True)
    )


def _best_way(names: Sequence[str], options: _Options, cost: Cost, machine: Machine) -> list[_Way]:
    """The fastest placement of a stage that fits by itself; devices hold nothing after it."""
    best = best_stage(names, options, cost=cost, machine=machine)
    return [] if best is None else [(best[0], ((0, 0),) * machine.num_devices, (best[1],))]


def _held_ways(names: Sequence[str], options: _Options, cost: Cost, machine: Machine) -> list[_Way]:
    """All placements of a stage that fit by slots and may be best for some rest."""
    partial: list[dict[str, Choice]] = [{}]
    for name in names:
        partial = [
            {**chosen, name: (option, devices)}
            for chosen in partial
            for option in options[name]
            for devices in combinations(range(machine.num_devices), option.degree)
            if all(_slots_on(chosen, device) + option.quota <= machine.num_slots for device in devices)
        ]
    ways: list[_Way] = []
    for chosen in partial:
        time_ms = _time_ms(chosen, cost)
        result = StageResult(latency_ns=round(time_ms * NS_PER_MS), choices=chosen)
        loads = tuple(
            (
                sum(option.kept_bytes for option, devices in chosen.values() if device in devices),
                sum(o.memory_bytes - o.kept_bytes for o, devices in chosen.values() if device in devices),
            )
            for device in range(machine.num_devices)
        )
        _keep(ways, (time_ms, loads, (result,)), machine)
    return ways


def _slots_on(chosen: Mapping[str, Choice], device: int) -> int:
    return sum(option.quota for option, devices in chosen.values() if device in devices)


def plan_by_brute_force(
    graph: ModuleGraph, cost: Cost, device: Device, *, num_devices: int = 1, search: SearchOptions | None = None
) -> Plan:
    """Returns the best plan there is, as ``mosaic.solver.solve`` returns one."""
    search = search or SearchOptions()
    options = all_options(graph, cost=cost, device=device, num_devices=num_devices, percents=search.percents)
    machine = Machine(num_devices=num_devices, num_slots=device.num_slots, memory_bytes=device.memory_bytes)
    is_held = search.hold_memory and keeps_anything(options, machine)
    best = best_stages(graph, options, cost=cost, machine=machine, is_held=is_held)
    plan = Plan(
        device=device,
        num_devices=num_devices,
        stages=build_stages(best, PlacedTimes(cost), machine),
        graph=graph.fingerprint,
        search=SearchRecord(method="brute_force", status="optimal"),
    )
    return replace(plan, search=replace(plan.search, bound_ms=plan.predicted_ms))
