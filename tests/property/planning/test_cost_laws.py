"""Plans under every form of interference agree with enumeration, and surfaces keep their physics."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from brute_force import best_stage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_cases import linear, profile_of, sample

from mosaic.cost import (
    Bandwidths,
    CostModel,
    Eq8,
    Eq8Interference,
    Interference,
    PairwiseInterference,
    ScalingSurface,
    Sharing,
)
from mosaic.cost.surfaces import time_bounds
from mosaic.profile import Phase, Sample
from mosaic.solver import StageEvaluator
from mosaic.solver.options import all_options
from mosaic.solver.stage import Machine

BOUNDED = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(max_examples=100, deadline=None, derandomize=True)
ROUNDING = 1 + 1e-9
NUM_SLOTS = 4


@st.composite
def disturbed(draw: st.DrawFn) -> tuple[CostModel, object]:
    names = "abc"[: draw(st.integers(2, 3))]
    work = st.floats(0.5, 20)
    profile = profile_of({n: linear(draw(work)) for n in names}, num_slots=NUM_SLOTS, degrees=(1, 2))
    share = st.floats(0, 1)
    bandwidths = Bandwidths(replace(s, bandwidth_utilisation=draw(share)) for s in profile.samples if s.degree == 1)
    weight = st.floats(0, 4)
    if draw(st.booleans()):
        eq8 = {p: Eq8(e1=draw(st.floats(-2, 2)), e2=draw(weight), e3=draw(weight)) for p in Phase}
        form: Interference = Eq8Interference(eq8, bandwidths)
    else:
        sharing = {p: Sharing(pressure=draw(weight), product=draw(weight)) for p in Phase}
        form = PairwiseInterference(sharing, bandwidths)
    cost = CostModel.from_profile(profile)
    cost.interference = form
    return cost, profile


@given(disturbed(), st.integers(1, 2))
@BOUNDED
def test_stage_eval_finds_what_enumeration_finds_under_every_form(made, num_devices: int) -> None:
    cost, profile = made
    machine = Machine(num_devices=num_devices, num_slots=NUM_SLOTS, memory_bytes=0)
    options = all_options(profile.graph, cost=cost, device=profile.device, num_devices=num_devices)
    names = profile.graph.names
    found = StageEvaluator(options, cost=cost, machine=machine, tolerance=1e-6).evaluate(names)
    exact = best_stage(names, options, cost=cost, machine=machine, by_sum=True)
    assert (found is None) == (exact is None)
    if found is not None and exact is not None:
        assert found.latency_ns == pytest.approx(exact[1].latency_ns, rel=2e-6, abs=10)


TIMES = st.dictionaries(st.integers(1, 64), st.floats(1e-3, 1e3), min_size=1, max_size=8)


@given(TIMES)
@MANY
def test_a_surface_never_rises_between_samples_that_fall(times: dict[int, float]) -> None:
    falling = dict(zip(sorted(times), sorted(times.values(), reverse=True), strict=True))
    surface = ScalingSurface([sample(q, t) for q, t in falling.items()])
    found = [surface.time_ms(1, q) for q in surface.quotas(1)]
    assert all(0 < after <= before * ROUNDING for before, after in itertools.pairwise(found))
    assert min(found) == min(falling.values())


@given(TIMES)
@MANY
def test_a_surface_stays_between_the_bounds_of_its_knots(times: dict[int, float]) -> None:
    surface = ScalingSurface([sample(q, t) for q, t in times.items()])
    knots = [(q, surface.time_ms(1, q)) for q in sorted(times)]
    for left, right in itertools.pairwise(knots):
        for quota in range(left[0] + 1, right[0]):
            low, high = time_bounds(quota, left, right)
            assert low / ROUNDING <= surface.time_ms(1, quota) <= high * ROUNDING


@given(TIMES, st.sets(st.integers(1, 64), max_size=4))
@MANY
def test_infeasible_points_take_away_quotas_and_change_no_others(times: dict[int, float], failed: set[int]) -> None:
    samples = [sample(q, t) for q, t in times.items() if q not in failed]
    if not samples:
        return
    holes = [Sample(module="m", phase=Phase.FORWARD, quota=q, infeasible="it raised") for q in failed]
    whole, holed = ScalingSurface(samples), ScalingSurface([*samples, *holes])
    assert set(holed.quotas(1)) <= set(whole.quotas(1)) - failed
    assert {s.quota for s in samples} <= set(holed.quotas(1))
    assert all(holed.time_ms(1, q) == whole.time_ms(1, q) for q in holed.quotas(1))
