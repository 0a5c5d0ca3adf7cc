"""The best way to run given stages at given degrees when devices hold what modules keep: everything, one by one.

Only small cases end within their nodes; a search that needs more is told so and keeps its bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mosaic.cost import Cost
from mosaic.solver.gahc.placement import Machine
from mosaic.solver.gahc.stage_eval import StageResult
from mosaic.solver.memory.holding import Stages, state_sets
from mosaic.solver.options import NS_PER_MS, DeploymentOption
from mosaic.solver.predict import build_stage
from mosaic.solver.slots import Choice, lay_out

_Devices = Mapping[str, tuple[int, ...]]


@dataclass
class PartitionSearch:
    """All devices of all modules of a partition, and for each the best quotas.

    Attributes:
        stages: The best found; None where nothing fits.
        cost_ms: What it takes.
        is_complete: Whether everything was looked at.
    """

    options: Mapping[str, Sequence[DeploymentOption]]
    """Of each module; all of one degree."""
    cost: Cost
    machine: Machine
    by_sum: bool
    """Minimise each stage's slowest module instead of its slowest forward and its slowest backward."""
    cost_ms: float
    """What must be beaten."""
    nodes_left: int
    ends: float = math.inf
    """When to stop, on ``time.perf_counter``'s clock."""
    stages: Stages | None = None
    is_complete: bool = True
    _best_of: dict[tuple[tuple[str, tuple[int, ...]], ...], StageResult | None] = field(default_factory=dict)

    def run(self, partition: Sequence[Sequence[str]], least_ms: Sequence[float]) -> None:
        """Searches; ``least_ms`` says what each stage takes at least."""
        count = self.machine.num_devices
        self._walk(partition, least_ms, 0, (), [0] * count, [0] * count)

    def is_over(self) -> bool:
        """Counts a node; whether there are none left, or no time."""
        self.nodes_left -= 1
        if self.nodes_left < 0 or time.perf_counter() > self.ends:
            self.is_complete = False
        return not self.is_complete

    def _walk(
        self,
        partition: Sequence[Sequence[str]],
        least_ms: Sequence[float],
        spent_ms: float,
        done: Stages,
        kept: list[int],
        most: list[int],
    ) -> None:
        if spent_ms + sum(least_ms[len(done) :]) >= self.cost_ms:
            return
        if len(done) == len(partition):
            self.cost_ms, self.stages = spent_ms, done
            return
        names = partition[len(done)]
        for devices in self._places(names, {}, kept, most, [0] * len(kept)):
            found = self._quotas(names, devices)
            if found is None:
                continue
            more_kept, working = list(kept), [0] * len(kept)
            for name in names:
                for device in devices[name]:
                    more_kept[device] += self.options[name][0].kept_bytes
                    working[device] += self.options[name][0].working_bytes
            more = [max(pair) for pair in zip(most, working, strict=True)]
            self._walk(
                partition,
                least_ms,
                spent_ms + found.latency_ns / NS_PER_MS,
                (*done, found),
                more_kept,
                more,
            )

    def _places(
        self,
        names: Sequence[str],
        chosen: dict[str, tuple[int, ...]],
        kept: list[int],
        most: list[int],
        work: list[int],
    ) -> Iterator[_Devices]:
        """Devices of a stage's modules that leave memory in use below what there is."""
        if len(chosen) == len(names):
            yield dict(chosen)
            return
        name = names[len(chosen)]
        option = self.options[name][0]
        roles = [tuple(n for n, devices in chosen.items() if g in devices) for g in range(len(kept))]
        for devices in state_sets([(kept[g], most[g], roles[g]) for g in range(len(kept))], option.degree):
            if self.is_over():
                return
            more_kept = [k + option.kept_bytes * (g in devices) for g, k in enumerate(kept)]
            more_work = [w + option.working_bytes * (g in devices) for g, w in enumerate(work)]
            peaks = [k + max(m, w) for k, m, w in zip(more_kept, most, more_work, strict=True)]
            if max(peaks) <= self.machine.memory_bytes:
                yield from self._places(names, {**chosen, name: devices}, more_kept, most, more_work)

    def _quotas(self, names: Sequence[str], devices: _Devices) -> StageResult | None:
        """The best quotas on given devices; ``latency_ns`` of the result is the stage's cost."""
        key = tuple((name, devices[name]) for name in names)
        if key not in self._best_of:
            walk = _Quotas(self, names, devices)
            walk.descend({}, [0] * self.machine.num_devices)
            self._best_of[key] = walk.result()
        return self._best_of[key]


@dataclass
class _Quotas:
    search: PartitionSearch
    names: Sequence[str]
    devices: _Devices
    best_ms: float = math.inf
    best: dict[str, Choice] | None = None

    def descend(self, chosen: dict[str, Choice], slots: list[int]) -> None:
        """Adds one module at each of its quotas; neighbours never help, so a part of a stage bounds it."""
        value = stage_ms(StageResult(latency_ns=0, choices=chosen, starts={}), self.search.cost, self.search.by_sum)
        if value >= self.best_ms:
            return
        if len(chosen) == len(self.names):
            self.best_ms, self.best = value, dict(chosen)
            return
        name = self.names[len(chosen)]
        here = self.devices[name]
        for option in sorted(self.search.options[name], key=lambda o: (o.latency_ns, o)):
            if self.search.is_over():
                return
            if all(slots[g] + option.quota <= self.search.machine.num_slots for g in here):
                taken = [s + option.quota * (g in here) for g, s in enumerate(slots)]
                self.descend({**chosen, name: (option, here)}, taken)

    def result(self) -> StageResult | None:
        """Returns the best stage found."""
        if self.best is None:
            return None
        starts = lay_out(self.best, self.search.machine.num_slots)
        return StageResult(latency_ns=round(self.best_ms * NS_PER_MS), choices=self.best, starts=starts)


def stage_ms(result: StageResult, cost: Cost, by_sum: bool) -> float:
    """Returns what a stage takes beside its neighbours, in milliseconds."""
    starts = {name: (0,) * len(devices) for name, (_, devices) in result.choices.items()}
    stage = build_stage(StageResult(latency_ns=0, choices=result.choices, starts=starts), cost)
    if by_sum:
        return max((p.forward_ms + p.backward_ms for p in stage.placements), default=0.0)
    return stage.forward_ms + stage.backward_ms
