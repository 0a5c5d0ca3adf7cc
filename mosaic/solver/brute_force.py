"""Every partition, every option, every placement: the truth for small inputs, and what tests compare with.

Nothing is shared with the search that it judges except the options. It minimises what a plan predicts
(``Plan.predicted_ms``): forward and backward each with its own maximum, with all interference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from mosaic.cost import Cost
from mosaic.graph import ModuleGraph
from mosaic.profile import Phase
from mosaic.solver.gahc.placement import Machine
from mosaic.solver.gahc.stage_eval import StageResult
from mosaic.solver.options import NS_PER_MS, DeploymentOption
from mosaic.solver.slots import Choice, lay_out

MAX_MODULES = 6
MAX_DEVICES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BruteForceResult:
    """The best plan there is."""

    stages: tuple[StageResult, ...]
    """In topological order."""
    num_evaluations: int
    """Sets of modules whose best allocation was searched."""


def enumerate_plans(
    graph: ModuleGraph, options: Mapping[str, Sequence[DeploymentOption]], *, cost: Cost, machine: Machine
) -> BruteForceResult:
    """Finds the plan with the least predicted time over all ordered partitions.

    A partition in an order that respects the dependencies is a chain of ever larger sets of finished modules,
    each closed under predecessors; the best way to reach a set is found once.

    Raises:
        ValueError: More than six modules or two devices.
    """
    check_size(graph, machine)
    order = graph.topological_order()
    needs = {name: frozenset(graph.predecessors(name)) for name in order}
    evaluated: dict[frozenset[str], tuple[float, StageResult] | None] = {}
    best: dict[frozenset[str], tuple[float, tuple[StageResult, ...]]] = {frozenset(): (0.0, ())}
    for done in closed_sets(order, needs):
        spent_ms, stages = best[done]
        ready = [name for name in order if name not in done and needs[name] <= done]
        for size in range(1, len(ready) + 1):
            for names in combinations(ready, size):
                key = frozenset(names)
                if key not in evaluated:
                    evaluated[key] = best_stage(names, options, cost=cost, machine=machine)
                found = evaluated[key]
                if found is None:
                    continue
                total = spent_ms + found[0]
                if total < best.get(done | key, (math.inf, ()))[0]:
                    best[done | key] = (total, (*stages, found[1]))
    return BruteForceResult(stages=best[frozenset(order)][1], num_evaluations=len(evaluated))


def check_size(graph: ModuleGraph, machine: Machine) -> None:
    """Raises ValueError for more than six modules or two devices."""
    if len(graph.names) > MAX_MODULES or machine.num_devices > MAX_DEVICES:
        raise ValueError(
            f"{len(graph.names)} modules on {machine.num_devices} devices; brute force takes at most {MAX_MODULES} "
            f"modules on {MAX_DEVICES} devices: use method='exact'"
        )


def best_stage(
    names: Sequence[str],
    options: Mapping[str, Sequence[DeploymentOption]],
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
    options: Mapping[str, Sequence[DeploymentOption]]
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
        result = StageResult(latency_ns=0, choices=chosen, starts={})
        forwards, backwards, sums = [0.0], [0.0], [0.0]
        for name, (option, devices) in chosen.items():
            on_each = [
                [
                    self.cost.placed_ms(name, phase, option.degree, option.quota, beside=result.beside(name, device))
                    for phase in Phase
                ]
                for device in devices
            ]
            forwards.append(max(forward for forward, _ in on_each))
            backwards.append(max(backward for _, backward in on_each))
            sums.append(max(forward + backward for forward, backward in on_each))
        return max(sums) if self.by_sum else max(forwards) + max(backwards)


def closed_sets(order: Sequence[str], needs: Mapping[str, frozenset[str]]) -> list[frozenset[str]]:
    """Returns all sets that hold every predecessor of their members, smaller ones first."""
    subsets = (frozenset(names) for size in range(len(order) + 1) for names in combinations(order, size))
    return [subset for subset in subsets if all(needs[name] <= subset for name in subset)]
