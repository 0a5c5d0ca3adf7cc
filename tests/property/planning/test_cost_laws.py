"""Surfaces keep their physics."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import sample

from mosaic.cost import ScalingSurface
from mosaic.cost.surfaces import time_bounds
from mosaic.profile import Phase, Sample

MANY = settings(max_examples=100, deadline=None, derandomize=True)
ROUNDING = 1 + 1e-9


TIMES = st.dictionaries(st.integers(1, 64), st.floats(1e-3, 1e3), min_size=1, max_size=8)


@given(TIMES)
@MANY
def test_a_surface_never_rises_between_samples_that_fall(times: dict[int, float]) -> None:
    falling = dict(zip(sorted(times), sorted(times.values(), reverse=True), strict=True))
    surface = ScalingSurface([sample(q, t) for q, t in falling.items()])
    times_ms = [surface.time_ms(1, q) for q in surface.quotas(1)]
    assert all(0 < after <= before * ROUNDING for before, after in itertools.pairwise(times_ms))
    assert min(times_ms) == min(falling.values())


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
