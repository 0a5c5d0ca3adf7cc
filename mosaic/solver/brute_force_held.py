"""Brute force where devices hold what modules keep: every way to reach a set of finished modules that may be best.

What is left to do depends on what each device holds already, so a set is reached in many ways: by time, by what each
device keeps, and by the most that one stage works with on it. Only a way that is no better in any of these is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from mosaic.cost import Cost
from mosaic.errors import InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.profile import Phase
from mosaic.solver.exact.brute_force import BruteForceResult, check_size, closed_sets
from mosaic.solver.gahc.placement import Machine
from mosaic.solver.gahc.stage_eval import StageResult
from mosaic.solver.options import NS_PER_MS, DeploymentOption
from mosaic.solver.slots import Choice, lay_out

_Loads = tuple[tuple[int, int], ...]
"""Of each device: kept bytes, and the most that one stage works with."""
_Way = tuple[float, _Loads, tuple[StageResult, ...]]
_Options = Mapping[str, Sequence[DeploymentOption]]


def enumerate_held_plans(graph: ModuleGraph, options: _Options, *, cost: Cost, machine: Machine) -> BruteForceResult:
    """Finds the plan with the least predicted time whose devices hold everything.

    Raises:
        ValueError: More than six modules or two devices.
        InfeasibleError: There is no such plan.
    """
    check_size(graph, machine)
    order = graph.topological_order()
    needs = {name: frozenset(graph.predecessors(name)) for name in order}
    stages: dict[tuple[str, ...], list[_Way]] = {}
    ways: dict[frozenset[str], list[_Way]] = {frozenset(): [(0.0, ((0, 0),) * machine.num_devices, ())]}
    for done in closed_sets(order, needs):
        ready = [name for name in order if name not in done and needs[name] <= done]
        for size in range(1, len(ready) + 1):
            for names in combinations(ready, size):
                if names not in stages:
                    stages[names] = _stage_ways(names, options, cost, machine)
                for way in ways.get(done, []):
                    for stage in stages[names]:
                        _keep(ways.setdefault(done | set(names), []), _joined(way, stage), machine)
    found = ways.get(frozenset(order), [])
    if not found:
        raise InfeasibleError(
            "no plan fits into the devices' memory",
            reasons=[f"every plan needs more than the {machine.memory_bytes:,} bytes of a device: all were tried"],
        )
    best = min(found, key=lambda way: way[0])
    return BruteForceResult(stages=best[2], num_evaluations=len(stages))


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


def _stage_ways(names: Sequence[str], options: _Options, cost: Cost, machine: Machine) -> list[_Way]:
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
        starts = lay_out(chosen, machine.num_slots)
        result = StageResult(latency_ns=round(time_ms * NS_PER_MS), choices=chosen, starts=starts)
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


def _time_ms(chosen: Mapping[str, Choice], cost: Cost) -> float:
    result = StageResult(latency_ns=0, choices=chosen, starts={})
    return sum(
        max(
            cost.placed_ms(name, phase, option.degree, option.quota, beside=result.beside(name, device))
            for name, (option, devices) in chosen.items()
            for device in devices
        )
        for phase in Phase
    )
