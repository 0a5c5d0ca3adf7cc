"""Laws that every comparison planner obeys, checked by a reading of its plan that shares no code with it.

No order between the planners is a law: it changes from input to input.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_cases import plan_of, profile_of

from mosaic.artifact import parse, to_json
from mosaic.cost import CostModel
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.plan import Plan
from mosaic.profile import ModuleMemory, Phase, Profile
from mosaic.simulate.step import simulate
from mosaic.solver.planners.spindle import MetaOp, continuous_optimum, two_points

BOUNDED = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
CLOSE = 1 + 1e-9
PLANNERS = ("sequential", "megatron", "data-parallel", "distmm", "spindle")
PHASES = ("forward_ms", "backward_ms")


@dataclass(frozen=True)
class Instance:
    profile: Profile
    num_devices: int
    layers: int
    hold_memory: bool = False

    def plan(self, name: str) -> Plan:
        options = {"layers": self.layers, "hold_memory": self.hold_memory}
        return plan_of(self.profile, name, num_devices=self.num_devices, **options)


def time_of(floor: float, work: float, cost_of_degree: float):
    return lambda degree, quota: floor + work / (degree * quota) + cost_of_degree * (degree - 1)


@st.composite
def instances(draw: st.DrawFn, max_modules: int = 6, max_devices: int = 6, degrees: tuple[int, ...] = ()) -> Instance:
    names = "abcdefgh"[: draw(st.integers(1, max_modules))]
    num_devices = draw(st.integers(1, max_devices))
    degrees = degrees or tuple(sorted({1} | draw(st.sets(st.integers(2, max_devices), max_size=3))))
    number = st.floats(0.01, 30, allow_nan=False)
    kinds = [time_of(draw(number), draw(number), draw(st.sampled_from([0.0, 0.5]))) for _ in range(3)]
    forward = {name: draw(st.sampled_from(kinds)) for name in names}
    possible = [(m, n) for i, m in enumerate(names) for n in names[i + 1 :]]
    memory = []
    memory_bytes = draw(st.sampled_from([0, 100]))
    if memory_bytes:  # some modules need several devices; all fit on the most that there are
        most = max(degree for degree in degrees if degree <= num_devices)
        sizes = st.integers(0, 50 * most)
        memory = [ModuleMemory(module=name, resident_bytes=50, activation_bytes=draw(sizes)) for name in names]
    profile = profile_of(
        forward,
        num_slots=draw(st.integers(1, 2)),
        degrees=degrees,
        edges=[edge for edge in possible if draw(st.integers(0, 3)) == 0],
        backward=time_of(draw(number), draw(number), 0.0) if draw(st.booleans()) else None,
        memory=memory,
        memory_bytes=memory_bytes,
    )
    return Instance(profile=profile, num_devices=num_devices, layers=draw(st.sampled_from([1, 5, 12])))


@pytest.mark.parametrize("name", PLANNERS)
@given(instance=instances())
@BOUNDED
def test_every_layer_runs_once_in_order_on_devices_of_its_own_in_the_cost_models_time(name, instance) -> None:
    plan, graph, device = instance.plan(name), instance.profile.graph, instance.profile.device
    assert parse(Plan, to_json(plan), source="plan.json") == plan
    assert instance.plan(name).stages == plan.stages
    step = simulate(plan, graph)
    assert step.makespan_ms <= plan.predicted_ms * CLOSE
    by_phase = {phase: defaultdict(list) for phase in Phase}
    busy = defaultdict(list)
    for span in step.spans:
        by_phase[span.phase][span.part.module].append(span)
        for held in span.devices:
            assert 0 <= held < instance.num_devices
            busy[held].append((span.start_ms, span.end_ms))
    for spans in busy.values():
        assert all(before[1] <= after[0] * CLOSE for before, after in itertools.pairwise(sorted(spans)))
    forward, backward = by_phase.values()
    assert set(forward) == set(backward) == set(graph.names)
    for spans in forward.values():
        spans.sort(key=lambda span: span.part.first)
        assert sum(Fraction(span.part.count, span.part.total) for span in spans) == 1
        layers = [layer for s in spans for layer in range(s.part.first, s.part.end)]
        assert layers == list(range(spans[0].part.total))
        assert all(before.end_ms <= after.start_ms * CLOSE for before, after in itertools.pairwise(spans))
    for edge in graph.edges:
        for spans, first, then in ((forward, edge.source, edge.target), (backward, edge.target, edge.source)):
            ended = max(span.end_ms for span in spans[first])
            assert ended <= min(span.start_ms for span in spans[then]) * CLOSE
    cost, room = CostModel.from_profile(instance.profile), device.memory_bytes or math.inf
    for placement in plan.placements:
        for phase, predicted in ((Phase.FORWARD, placement.forward_ms), (Phase.BACKWARD, placement.backward_ms)):
            own_ms = cost.time_ms(placement.module, phase, placement.degree, placement.quota)
            assert predicted == pytest.approx(placement.part.share * own_ms)
        assert cost.memory_bytes(placement.module, placement.degree) <= room
        assert name == "sequential" or placement.quota == device.num_slots
    total = sum(max(getattr(p, way) for p in s.placements) for s in plan.stages for way in PHASES)
    assert plan.predicted_ms == pytest.approx(total)


@pytest.mark.parametrize("name", PLANNERS)
@given(instance=instances())
@settings(BOUNDED, max_examples=20)
def test_what_modules_keep_fits_on_every_device_or_there_is_a_reason(name: str, instance: Instance) -> None:
    free = instance.plan(name)
    cost = CostModel.from_profile(instance.profile)
    try:
        holding = replace(instance, hold_memory=True).plan(name)
    except (InfeasibleError, UndecidedError):
        assert instance.profile.device.memory_bytes
        return
    if name == "spindle":  # which takes no other degrees
        assert holding.predicted_ms == free.predicted_ms
    assert holding.predicted_ms >= free.predicted_ms / CLOSE or name == "sequential"
    room = instance.profile.device.memory_bytes or math.inf
    held_bytes = [0.0] * instance.num_devices
    for placement in holding.placements:
        for device in placement.devices:
            held_bytes[device] += cost.kept_bytes(placement.module, placement.degree) * placement.part.share
    assert max(held_bytes) <= room * CLOSE


@given(instances(max_modules=5, max_devices=4))
@BOUNDED
def test_plans_are_in_the_one_order_that_is_a_law(instance: Instance) -> None:
    plans = {name: instance.plan(name) for name in (*PLANNERS, "exact")}
    exact, ms = plans["exact"], {name: plan.predicted_ms for name, plan in plans.items()}
    for plan in plans.values():
        assert plan.sequential_ms == pytest.approx(exact.sequential_ms)
        if not plan.sliced and exact.search.status == "optimal":
            assert exact.predicted_ms <= plan.predicted_ms * (1 + 1e-6)
    assert ms["distmm"] <= ms["megatron"] * (1 + 1e-6)
    assert max(ms["megatron"], ms["sequential"]) <= ms["data-parallel"] * (1 + 1e-6)
    assert ms["sequential"] <= ms["megatron"] * (1 + 1e-6)  # each at its own best


@st.composite
def metaops(draw: st.DrawFn, num_devices: int) -> MetaOp:
    degrees = sorted(draw(st.sets(st.integers(1, num_devices), min_size=1, max_size=4)))
    times = sorted(draw(st.sets(st.integers(1, 1000), min_size=len(degrees), max_size=len(degrees))), reverse=True)
    return MetaOp(degrees=tuple(degrees), times=tuple(float(t) for t in times), num_operators=draw(st.integers(1, 30)))


@given(st.data(), st.integers(1, 16))
@BOUNDED
def test_the_continuous_optimum_fills_the_devices_and_all_end_together(data, num_devices) -> None:
    level = data.draw(st.lists(metaops(num_devices), min_size=1, max_size=6))
    end, devices = continuous_optimum(level, num_devices)
    assert sum(devices) <= num_devices * CLOSE
    slowest = max(one.times[-1] * one.num_operators for one in level)
    assert end >= slowest / CLOSE
    # Either no device is idle, or somebody is as fast as it gets.
    assert sum(devices) == pytest.approx(num_devices, rel=1e-6) or end == pytest.approx(slowest)
    for one, share in zip(level, devices, strict=True):
        for count in two_points(one, share, end):
            assert count.degree in one.degrees
        points = two_points(one, share, end)
        assert sum(point.count for point in points) == pytest.approx(one.num_operators)
        if len(points) == 2:
            assert sum(one.time(p.degree) * p.count for p in points) == pytest.approx(end, rel=1e-6)
            assert points[1].degree < share < points[0].degree
    # Whole devices are one way to share them, so they cannot do better than the relaxation.
    for degrees in itertools.islice(itertools.product(*(one.degrees for one in level)), 500):
        if sum(degrees) <= num_devices:
            whole = max(one.time(n) * one.num_operators for one, n in zip(level, degrees, strict=True))
            assert end <= whole * (1 + 1e-6)
