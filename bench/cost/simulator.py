"""A simulator of shared bandwidth that no form of interference knows. Whatever comes from here is simulated.

A module takes its launches, and then the longer of its arithmetic, shared out over its slots, and its memory traffic,
at the rate that its slots can draw or that is left to it. Where modules would draw more than there is together, rates
are cut by one of four rules:

* *in proportion*: all by the same factor;
* *max-min*: down to one level a slot's rate, with those below it left alone;
* *mixed*: half of the cut, as a factor, hits all, the other half is max-min; neighbours evict caches, so that traffic
  grows, ever less so; and the more modules, the less of the bandwidth there is (row conflicts);
* *queueing*: nothing is cut at a limit; the more is drawn, the longer each request takes, long before all is drawn, and
  who has headroom hides it.

Our form has none of these formulas, but it was chosen while its errors under the first three were looked at, on other
seeds; only the last is new to it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.cost.fitting.design import GroupRun
from bench.cost.fitting.group import GroupMember, GroupSample
from mosaic.device import Device
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.plan import Plan
from mosaic.profile import Environment, Phase, Profile, Sample

NUM_SLOTS = 16
DEVICE = Device(name="simulated", kind="cuda", num_slots=NUM_SLOTS)
_HALVINGS = 40
_ITERATIONS = 100
_EVICTED = 0.12  # most growth of traffic
_ROW_CONFLICTS = 0.06  # most bandwidth lost
_WAITING = 0.15
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

    def asks(self, quota: int) -> float:
        """Returns the rate at which its traffic goes alone, outside of its launches."""
        return self.memory_ms / (self.alone_ms(quota) - self.launch_ms)

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
    if rule == "queueing":
        return _queueing_ms(works, quotas)
    asked = [work.asks(quota) for work, quota in zip(works, quotas, strict=True)]
    caps = [work.cap(quota) for work, quota in zip(works, quotas, strict=True)]
    growth, capacity = [1.0] * len(works), 1.0
    if rule == "mixed":
        shares = [work.share(quota) for work, quota in zip(works, quotas, strict=True)]
        growth = [1 + _EVICTED * (1 - math.exp(share - math.fsum(shares))) for share in shares]
        capacity = max(1 - _ROW_CONFLICTS * (1 - 1 / len(works)), *shares, 0.0)

    def rate(level: float, ask: float, cap: float, grown: float) -> float:
        if rule == "in proportion":
            return level * ask
        if rule == "max-min":
            return min(ask, level * cap)
        half = math.sqrt(level)
        return min(cap, half * min(ask, half * cap) * grown)

    def times(level: float) -> list[float]:
        rates = [rate(level, *of) for of in zip(asked, caps, growth, strict=True)]
        return [
            max(work.alone_ms(quota), work.launch_ms + work.memory_ms * grown / given)
            for work, quota, grown, given in zip(works, quotas, growth, rates, strict=True)
        ]

    def drawn(level: float) -> float:
        return math.fsum(
            work.memory_ms * grown / time for work, grown, time in zip(works, growth, times(level), strict=True)
        )

    low, high = 0.0, 1.0
    if drawn(high) <= capacity:
        return times(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if drawn(middle) > capacity else (middle, high)
    return times(low)


def _queueing_ms(works: Sequence[Work], quotas: Sequence[int]) -> list[float]:
    """Times at which what is drawn and what requests take agree, by damped iteration."""
    times = [work.alone_ms(quota) for work, quota in zip(works, quotas, strict=True)]
    for _ in range(_ITERATIONS):
        drawn = [work.memory_ms / time for work, time in zip(works, times, strict=True)]
        total = min(1.0, math.fsum(drawn))
        for index, (work, quota) in enumerate(zip(works, quotas, strict=True)):
            longer = 1 + _WAITING * max(0.0, total - drawn[index]) / (1 - 0.9 * total)
            found = max(work.alone_ms(quota), work.launch_ms + work.memory_ms / work.cap(quota) * longer)
            times[index] += 0.2 * (found - times[index])
    return times


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


def measure_run(works: Sequence[Work], run: GroupRun, rule: str, dice: random.Random, noise: float) -> GroupSample:
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


def profile_of(works: Sequence[Work]) -> Profile:
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
    return Profile(device=DEVICE, graph=ModuleGraph(modules=nodes), samples=samples, environment=environment)
