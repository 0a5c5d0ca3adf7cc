"""Small made-up profiles for the tests of cost models and solvers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
