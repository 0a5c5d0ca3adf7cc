"""Small made-up profiles for the tests of cost models and solvers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from hypothesis import strategies as st

from mosaic.cost import CostModel
from mosaic.device import Device
from mosaic.graph import Edge, ModuleGraph, ModuleNode
from mosaic.plan import Plan
from mosaic.profile import Environment, ModuleMemory, PairSample, Phase, Profile, Sample
from mosaic.solver import SearchOptions, solve

Time = Callable[[int, int], float]
"""Milliseconds over (degree, quota)."""

ENVIRONMENT = Environment(torch_version="2.11", python_version="3.11", created="2026-01-01", foreign_cpu_share=0.0)


def device_of(num_slots: int, memory_bytes: int = 0) -> Device:
    return Device(name="made-up", kind="cuda", num_slots=num_slots, memory_bytes=memory_bytes)


def graph_of(names: Iterable[str], edges: Iterable[tuple[str, str]] = ()) -> ModuleGraph:
    return ModuleGraph(
        modules=tuple(ModuleNode(name=name) for name in names),
        edges=tuple(Edge(source=source, target=target) for source, target in edges),
    )


def sample(quota: int, *times_ms: float, module: str = "m", phase: Phase = Phase.FORWARD, degree: int = 1) -> Sample:
    return Sample(module=module, phase=phase, quota=quota, degree=degree, times_ms=times_ms)


def pair(
    module: str, beside: str, slowdown: float, *, phase: Phase, quota: int = 1, beside_quota: int = 1
) -> PairSample:
    return PairSample(
        module=module,
        beside=beside,
        phase=phase,
        quota=quota,
        beside_quota=beside_quota,
        times_ms=(10.0 * slowdown,),
        alone_ms=(10.0,),
    )


def profile_of(
    forward: dict[str, Time],
    *,
    num_slots: int,
    degrees: Sequence[int] = (1,),
    edges: Iterable[tuple[str, str]] = (),
    backward: Time | None = None,
    pairs: Iterable[PairSample] = (),
    memory: Iterable[ModuleMemory] = (),
    memory_bytes: int = 0,
) -> Profile:
    """Every module at every quota and degree; its backward takes as long as its forward unless given."""
    samples = [
        sample(quota, time(degree, quota), module=name, phase=phase, degree=degree)
        for name, own in forward.items()
        for phase, time in ((Phase.FORWARD, own), (Phase.BACKWARD, backward or own))
        for degree in degrees
        for quota in range(1, num_slots + 1)
    ]
    return Profile(
        device=device_of(num_slots, memory_bytes),
        graph=graph_of(forward, edges),
        samples=tuple(samples),
        pairs=tuple(pairs),
        memory=tuple(memory),
        environment=ENVIRONMENT,
    )


def plan_of(profile: Profile, method: str = "gahc", *, num_devices: int = 1, **search: Any) -> Plan:
    """The plan of a method for a profile's own graph and device."""
    cost, options = CostModel.from_profile(profile), SearchOptions(**search)
    return solve(profile.graph, cost, profile.device, num_devices=num_devices, method=method, search=options)


def flat(time_ms: float) -> Time:
    """A module bound by its launches: no slot and no device makes it faster."""
    return lambda degree, quota: time_ms


def linear(time_ms: float) -> Time:
    """A module that scales perfectly with slots and devices."""
    return lambda degree, quota: time_ms / (degree * quota)


@dataclass(frozen=True)
class DrawnProfile:
    """A profile drawn at random, and the devices to plan for."""

    profile: Profile
    num_devices: int

    def plan(self, method: str = "gahc", **search: Any) -> Plan:
        """Each stage's memory is checked alone unless ``hold_memory`` is set."""
        return plan_of(self.profile, method, num_devices=self.num_devices, **({"hold_memory": False} | search))


@st.composite
def drawn_profiles(
    draw: st.DrawFn,
    max_modules: int = 4,
    max_devices: int = 2,
    max_slots: int = 4,
    *,
    degrees: Sequence[int] = (1, 2, 4),
    has_pairs: bool = True,
) -> DrawnProfile:
    """Modules with a floor and work that scales, some measured in pairs, some with a limit of memory."""
    names = "abcdef"[: draw(st.integers(1, max_modules))]
    num_slots = draw(st.integers(1, max_slots))
    work = st.floats(0.01, 30, allow_nan=False)

    def time_of(floor: float, scaling: float) -> Time:
        return lambda degree, quota: floor + scaling / (degree * quota)

    possible = [(m, n) for i, m in enumerate(names) for n in names[i + 1 :]]
    pairs = []
    if has_pairs and draw(st.booleans()):
        for m, n in permutations(names, 2):
            for beside_quota in {1, num_slots}:
                slowdown = draw(st.floats(0.9, 2.0))
                pairs += [pair(m, n, slowdown, phase=phase, beside_quota=beside_quota) for phase in Phase]
    kept = st.integers(0, 60)
    profile = profile_of(
        {name: time_of(draw(work), draw(work)) for name in names},
        num_slots=num_slots,
        degrees=[degree for degree in degrees if degree <= max_devices],
        edges=[edge for edge in possible if draw(st.integers(0, 3)) == 0],
        backward=time_of(draw(work), draw(work)),
        pairs=pairs,
        memory=[ModuleMemory(module=m, resident_bytes=draw(kept), activation_bytes=draw(kept)) for m in names],
        memory_bytes=draw(st.sampled_from([0, 120, 200])),
    )
    return DrawnProfile(profile=profile, num_devices=draw(st.integers(1, max_devices)))
