"""Measured times in a cost model, and how much of what wrong predictions cost they recover."""

from __future__ import annotations

import math

import pytest
from planning_cases import flat, linear, profile_of

from mosaic.cost import CostModel
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.solver import solve
from mosaic.solver.feedback import MeasuredTimes, with_measured

TIMES = {"a": linear(6), "b": flat(4), "c": linear(8)}


def case() -> tuple[Plan, CostModel]:
    profile = profile_of(TIMES, num_slots=4)
    cost = CostModel.from_profile(profile)
    return solve(profile.graph, cost, profile.device), cost


def test_a_measured_time_is_taken_over_where_it_was_measured() -> None:
    plan, cost = case()
    placement = plan.placement("a")
    corrected = with_measured(cost, plan, {("a", Phase.FORWARD): 1.5 * placement.forward_ms})
    at = (placement.degree, placement.quota)
    assert corrected.placed_ms("a", Phase.FORWARD, *at) == pytest.approx(1.5 * placement.forward_ms)
    assert corrected.time_ms("a", Phase.BACKWARD, *at) == cost.time_ms("a", Phase.BACKWARD, *at)
    assert corrected.time_ms("b", Phase.FORWARD, 1, 1) == cost.time_ms("b", Phase.FORWARD, 1, 1)


def test_a_second_measurement_adds_to_the_first() -> None:
    plan, cost = case()
    placement = plan.placement("a")
    once = with_measured(cost, plan, {("a", Phase.FORWARD): 2 * placement.forward_ms})
    again = with_measured(once, plan, {("a", Phase.FORWARD): placement.forward_ms / 2})
    assert isinstance(again.base, CostModel)
    assert again.ratio("a", Phase.FORWARD, placement.degree, placement.quota) == pytest.approx(1.0)


@pytest.mark.parametrize("measured", [{("z", Phase.FORWARD): 1.0}, {("a", Phase.FORWARD): math.nan}])
def test_senseless_measurements_are_refused(measured: MeasuredTimes) -> None:
    plan, cost = case()
    with pytest.raises(ValueError, match="give finite times of the plan's modules"):
        with_measured(cost, plan, measured)


def test_a_reach_of_nothing_is_refused() -> None:
    plan, cost = case()
    with pytest.raises(ValueError, match="reach=0; use a finite number above 0"):
        with_measured(cost, plan, {}, reach=0)
