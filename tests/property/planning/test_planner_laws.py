"""Laws that every comparison planner obeys, checked by a reading of its plan that shares no code with it.

No order between the planners is a law: it changes from input to input.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_cases import DrawnProfile, drawn_profiles

from mosaic.artifact import parse, to_json
from mosaic.cost import CostModel
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.simulate.step import simulate

BOUNDED = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
CLOSE = 1 + 1e-9
PLANNERS = ("sequential", "megatron", "data-parallel", "distmm", "spindle")
PHASES = ("forward_ms", "backward_ms")


LAYERS = st.sampled_from([1, 5, 12])
PROFILES = st.sets(st.integers(2, 6), max_size=3).flatmap(
    lambda degrees: drawn_profiles(6, 6, 2, degrees=(1, *sorted(degrees)), has_pairs=False)
)


@pytest.mark.parametrize("name", PLANNERS)
@given(instance=PROFILES, layers=LAYERS)
@BOUNDED
def test_every_layer_runs_once_in_order_on_devices_of_its_own_in_the_cost_models_time(name, instance, layers) -> None:
    plan, graph, device = instance.plan(name, layers=layers), instance.profile.graph, instance.profile.device
    assert parse(Plan, to_json(plan), source="plan.json") == plan
    assert instance.plan(name, layers=layers).stages == plan.stages
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
@given(instance=PROFILES, layers=LAYERS)
@settings(BOUNDED, max_examples=20)
def test_what_modules_keep_fits_on_every_device_or_there_is_a_reason(name, instance: DrawnProfile, layers) -> None:
    free = instance.plan(name, layers=layers)
    cost = CostModel.from_profile(instance.profile)
    try:
        holding = instance.plan(name, layers=layers, hold_memory=True)
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


@given(drawn_profiles(5, 4, 2, degrees=(1, 2, 3, 4), has_pairs=False))
@BOUNDED
def test_plans_are_in_the_one_order_that_is_a_law(instance: DrawnProfile) -> None:
    plans = {name: instance.plan(name) for name in (*PLANNERS, "exact")}
    exact, ms = plans["exact"], {name: plan.predicted_ms for name, plan in plans.items()}
    for plan in plans.values():
        assert plan.sequential_ms == pytest.approx(exact.sequential_ms)
        if not plan.sliced and exact.search.status == "optimal":
            assert exact.predicted_ms <= plan.predicted_ms * (1 + 1e-6)
    assert ms["distmm"] <= ms["megatron"] * (1 + 1e-6)
    assert max(ms["megatron"], ms["sequential"]) <= ms["data-parallel"] * (1 + 1e-6)
    assert ms["sequential"] <= ms["megatron"] * (1 + 1e-6)  # each at its own best
