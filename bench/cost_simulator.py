"""A simulator of shared bandwidth that no form of interference knows. Whatever comes from here is simulated.

A module takes its launches, and then the longer of its arithmetic, shared out over its slots, and its memory traffic,
at the rate that its slots can draw or that is left to it. What is left is shared in proportion to what modules ask for,
or evenly by what their slots could draw, with the rest going round (max-min).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from mosaic.cost import Run
from mosaic.device import Device
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.plan import Plan
from mosaic.profile import Environment, GroupMember, GroupSample, Phase, Profile, Sample

NUM_SLOTS = 16
DEVICE = Device(name="simulated", kind="cuda", num_slots=NUM_SLOTS)
_BACKWARD = 2.0  # work of a backward over that of a forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One simulated module."""

    name: str
    """Its name."""
    arithmetic_ms: float
    """Arithmetic of its forward on one slot."""
    launch_ms: float
    """What no slot makes faster."""
    memory_ms: float
    """Traffic of its forward at the device's full bandwidth."""
    rate: float
    """Share of the bandwidth that one slot can draw."""

    def cap(self, quota: int) -> float:
        """Returns the share of the bandwidth that its slots can draw."""
        return min(1.0, self.rate * quota)

    def alone_ms(self, quota: int) -> float:
        """Returns its time alone."""
        return self.launch_ms + max(self.arithmetic_ms / quota, self.memory_ms / self.cap(quota))

    def slowed_ms(self, quota: int, share: float) -> float:
        """Returns its time with a share of the bandwidth on average, all of it outside of its launches."""
        alone = self.alone_ms(quota)
        busy = alone - self.launch_ms
        return self.launch_ms + max(self.arithmetic_ms / quota, self.memory_ms / share * busy / alone)

    def share(self, quota: int) -> float:
        """Returns the share of the bandwidth that it uses alone: B of Eq. 8."""
        return self.memory_ms / self.alone_ms(quota)


def draw_works(count: int, dice: random.Random) -> tuple[Work, ...]:
    """Draws modules from compute-bound to memory-bound."""
    return tuple(
        Work(
            name=f"m{i}",
            arithmetic_ms=dice.uniform(5, 60),
            launch_ms=dice.uniform(0.2, 2),
            memory_ms=dice.uniform(0.2, 4),
            rate=dice.uniform(0.08, 0.3),
        )
        for i in range(count)
    )


def together_ms(works: Sequence[Work], quotas: Sequence[int], rule: str) -> list[float]:
    """Returns the time of each module while all others keep running."""
    wanted = [work.share(quota) for work, quota in zip(works, quotas, strict=True)]
    if rule == "in proportion":
        given = [share / max(1.0, math.fsum(wanted)) for share in wanted]
    else:
        given = _max_min(wanted, [work.cap(quota) for work, quota in zip(works, quotas, strict=True)])
    return [w.slowed_ms(quota, share) for w, quota, share in zip(works, quotas, given, strict=True)]


def finish_ms(works: Sequence[Work], quotas: Sequence[int], rule: str) -> float:
    """Returns when the last of modules that start together has ended; who has ended leaves its bandwidth."""
    left = dict.fromkeys(range(len(works)), 1.0)
    now = 0.0
    while left:
        running = list(left)
        paces = together_ms([works[i] for i in running], [quotas[i] for i in running], rule)
        step = min(left[i] * pace for i, pace in zip(running, paces, strict=True))
        for i, pace in zip(running, paces, strict=True):
            left[i] -= step / pace
        left = {i: share for i, share in left.items() if share > 1e-9}
        now += step
    return now


def run_plan_ms(plan: Plan, works: Sequence[Work], rule: str) -> float:
    """Returns the time of a step of a plan on one device: stages in turn, forward and backward."""
    by_name = {work.name: work for work in works}
    stages = [([by_name[p.module] for p in s.placements], [p.quota for p in s.placements]) for s in plan.stages]
    return (1 + _BACKWARD) * math.fsum(finish_ms(chosen, quotas, rule) for chosen, quotas in stages)


def measure_run(works: Sequence[Work], run: Run, rule: str, dice: random.Random, noise: float) -> GroupSample:
    """Returns what a profiler would see of the forwards of a group, with noise."""
    chosen = [next(work for work in works if work.name == name) for name in run.modules]
    members = tuple(
        GroupMember(
            module=work.name,
            phase=Phase.FORWARD,
            quota=quota,
            times_ms=(time * math.exp(dice.gauss(0, noise)),),
            alone_ms=(work.alone_ms(quota) * math.exp(dice.gauss(0, noise)),),
        )
        for work, quota, time in zip(chosen, run.quotas, together_ms(chosen, run.quotas, rule), strict=True)
    )
    return GroupSample(members=members)


def profile_of(works: Sequence[Work], groups: Sequence[GroupSample]) -> Profile:
    """Returns the profile that a profiler would make of independent modules, without noise, at every quota."""
    samples = tuple(
        Sample(
            module=work.name,
            phase=phase,
            quota=quota,
            times_ms=(work.alone_ms(quota) * (_BACKWARD if phase is Phase.BACKWARD else 1.0),),
            bandwidth_utilisation=min(1.0, work.share(quota)),
        )
        for work in works
        for phase in Phase
        for quota in range(1, NUM_SLOTS + 1)
    )
    nodes = tuple(ModuleNode(name=work.name, num_parameters=1) for work in works)
    environment = Environment(torch_version="", python_version="", created="", foreign_cpu_share=0.0)
    return Profile(
        device=DEVICE, graph=ModuleGraph(modules=nodes), samples=samples, groups=tuple(groups), environment=environment
    )


def _max_min(wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    given, left, todo = list(wanted), 1.0, set(range(len(wanted)))
    while todo:
        weight = math.fsum(weights[i] for i in todo)
        served = {i for i in todo if wanted[i] <= left * weights[i] / weight}
        if not served:
            for i in todo:
                given[i] = left * weights[i] / weight
            break
        left -= math.fsum(wanted[i] for i in served)
        todo -= served
    return given
