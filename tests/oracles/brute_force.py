"""Every partition, every option, every placement: the truth for small inputs, and what tests compare with.

Nothing is shared with the search that it judges except the options. It minimises what a plan predicts
(``Plan.predicted_ms``): forward and backward each with its own maximum, with all interference.

A partition in an order that respects the dependencies is a chain of ever larger sets of finished modules, each closed
under predecessors. Where each stage's memory counts alone, the best way to reach a set is found once. Where devices
hold what modules keep, what is left to do depends on what each device holds already, so a set is reached in many ways:
by time, by what each device keeps, and by the most that one stage works with on it. Only a way that is no better in any
of these is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.errors import InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, SearchRecord
from mosaic.profile import Phase
from mosaic.solver.held_memory import keeps_anything
from mosaic.solver.options import NS_PER_MS, DeploymentOption, all_options
from mosaic.solver.predict import PlacedTimes, build_stage
from mosaic.solver.stage import Choice, Machine, StageResult, lay_out
from mosaic.solver.task import SearchOptions

MAX_MODULES = 6
MAX_DEVICES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BruteForceResult:
    """The best plan there is."""

    stages: tuple[StageResult, ...]
    """In topological order."""
    num_evaluations: int
    """Sets of modules whose best allocation was searched."""


_Options = Mapping[str, Sequence[DeploymentOption]]
_Loads = tuple[tuple[int, int], ...]
"""Of each device: kept bytes, and the most that one stage works with."""
_Way = tuple[float, _Loads, tuple[StageResult, ...]]


def enumerate_plans(graph: ModuleGraph, options: _Options, *, cost: Cost, machine: Machine) -> BruteForceResult:
    """Finds the plan with the least predicted time over all ordered partitions.

    Raises:
        ValueError: More than six modules or two devices.
    """
    evaluated: dict[tuple[str, ...], tuple[float, StageResult] | None] = {}
    best: dict[frozenset[str], tuple[float, tuple[StageResult, ...]]] = {frozenset(): (0.0, ())}
    for done, names in _steps(graph, machine):
        if names not in evaluated:
            evaluated[names] = best_stage(names, options, cost=cost, machine=machine)
        found = evaluated[names]
        if found is None:
            continue
        spent_ms, stages = best[done]
        after = done | set(names)
        if spent_ms + found[0] < best.get(after, (math.inf, ()))[0]:
            best[after] = (spent_ms + found[0], (*stages, found[1]))
    return BruteForceResult(stages=best[frozenset(graph.names)][1], num_evaluations=len(evaluated))


def enumerate_held_plans(graph: ModuleGraph, options: _Options, *, cost: Cost, machine: Machine) -> BruteForceResult:
    """Finds the plan with the least predicted time whose devices hold what all modules keep.

    Raises:
        ValueError: More than six modules or two devices.
        InfeasibleError: There is no such plan.
    """
    stages: dict[tuple[str, ...], list[_Way]] = {}
    ways: dict[frozenset[str], list[_Way]] = {frozenset(): [(0.0, ((0, 0),) * machine.num_devices, ())]}
    for done, names in _steps(graph, machine):
        if names not in stages:
            stages[names] = _stage_ways(names, options, cost, machine)
        for way in ways.get(done, []):
            for stage in stages[names]:
                _keep(ways.setdefault(done | set(names), []), _joined(way, stage), machine)
    found = ways.get(frozenset(graph.names), [])
    if not found:
        raise InfeasibleError(
            "no plan fits into the devices' memory",
            reasons=[f"every plan needs more than the {machine.memory_bytes:,} bytes of a device: all were tried"],
        )
    return BruteForceResult(stages=min(found, key=lambda way: way[0])[2], num_evaluations=len(stages))


def _steps(graph: ModuleGraph, machine: Machine) -> Iterator[tuple[frozenset[str], tuple[str, ...]]]:
    """Sets of finished modules, smaller ones first, each with every stage that may come next."""
    if len(graph.names) > MAX_MODULES or machine.num_devices > MAX_DEVICES:
        raise ValueError(
            f"{len(graph.names)} modules on {machine.num_devices} devices; brute force takes at most {MAX_MODULES} "
            f"modules on {MAX_DEVICES} devices: use method='exact'"
        )
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
    names: Sequence[str],
    options: _Options,
    *,
    cost: Cost,
    machine: Machine,
    by_sum: bool = False,
) -> tuple[float, StageResult] | None:
    """Finds the best allocation of one stage, or None where its modules do not fit side by side.

    Args:
        names: Modules of the stage.
        options: Their deployment options.
        cost: Asked for times and interference.
        machine: At most two devices.
        by_sum: Minimise the slowest module's forward and backward together (the paper's Eq. 4), instead of
            the sum of the slowest forward and the slowest backward.

    Returns:
        The value that was minimised, in milliseconds, and the allocation.
    """
    walk = _Walk(names=tuple(names), options=options, cost=cost, machine=machine, by_sum=by_sum)
    walk.descend({}, [0] * machine.num_devices, [0] * machine.num_devices)
    if walk.best is None:
        return None
    starts = lay_out(walk.best, machine.num_slots)
    result = StageResult(latency_ns=round(walk.best_ms * NS_PER_MS), choices=walk.best, starts=starts)
    return walk.best_ms, result


@dataclass
class _Walk:
    names: tuple[str, ...]
    options: _Options
    cost: Cost
    machine: Machine
    by_sum: bool
    best_ms: float = math.inf
    best: dict[str, Choice] | None = field(default=None)

    def descend(self, chosen: dict[str, Choice], slots: list[int], memory: list[int]) -> None:
        """Adds one module in every way; interference never helps, so a partial value is a lower bound."""
        value = self.value_ms(chosen)
        if value >= self.best_ms:
            return
        if len(chosen) == len(self.names):
            self.best_ms, self.best = value, dict(chosen)
            return
        name = self.names[len(chosen)]
        for option in sorted(self.options[name], key=lambda o: (o.latency_ns, o)):
            for devices in combinations(range(self.machine.num_devices), option.degree):
                if not self.fits(option, devices, slots, memory):
                    continue
                more_slots = [s + option.quota * (g in devices) for g, s in enumerate(slots)]
                more_memory = [m + option.memory_bytes * (g in devices) for g, m in enumerate(memory)]
                self.descend({**chosen, name: (option, devices)}, more_slots, more_memory)

    def fits(self, option: DeploymentOption, devices: Sequence[int], slots: list[int], memory: list[int]) -> bool:
        limit = self.machine.memory_bytes or math.inf
        return all(
            slots[g] + option.quota <= self.machine.num_slots and memory[g] + option.memory_bytes <= limit
            for g in devices
        )

    def value_ms(self, chosen: Mapping[str, Choice]) -> float:
        return _time_ms(chosen, self.cost, by_sum=self.by_sum)


def _time_ms(chosen: Mapping[str, Choice], cost: Cost, *, by_sum: bool = False) -> float:
    """Time of a stage: slowest forward plus slowest backward, or the slowest module's two together."""
    result = StageResult(latency_ns=0, choices=chosen, starts={})
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


def plan_by_brute_force(
    graph: ModuleGraph, cost: Cost, device: Device, *, num_devices: int = 1, search: SearchOptions | None = None
) -> Plan:
    """Returns the best plan there is, as ``mosaic.solver.solve`` returns one.

    Raises:
        ValueError: More than six modules or two devices.
        InfeasibleError: There is no plan.
    """
    search = search or SearchOptions()
    options = all_options(graph, cost=cost, device=device, num_devices=num_devices, percents=search.percents)
    machine = Machine(num_devices=num_devices, num_slots=device.num_slots, memory_bytes=device.memory_bytes)
    is_held = search.hold_memory and keeps_anything(options, machine)
    every = (enumerate_held_plans if is_held else enumerate_plans)(graph, options, cost=cost, machine=machine)
    times = PlacedTimes(cost)
    stages = tuple(build_stage(stage, times) for stage in every.stages)
    plan = Plan(
        device=device,
        num_devices=num_devices,
        stages=stages,
        graph=graph.fingerprint,
        search=SearchRecord(method="brute_force", num_evaluations=every.num_evaluations, status="optimal"),
    )
    return replace(plan, search=replace(plan.search, bound_ms=plan.predicted_ms))
