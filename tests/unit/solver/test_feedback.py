"""Measured times in a cost model, and how much of what wrong predictions cost they recover."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from planning_cases import Time, flat, linear, profile_of

from mosaic.cost import Cost, CostModel
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.solver import solve
from mosaic.solver.feedback import CorrectedCost, MeasuredTimes, with_measured

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


def test_a_ratio_is_trusted_less_far_from_where_it_was_measured() -> None:
    corrected = CorrectedCost(case()[1], {("a", Phase.FORWARD): {(1, 1): 2.0}}, reach=1.0)
    ratios = [corrected.ratio("a", Phase.FORWARD, 1, quota) for quota in range(1, 5)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == 2.0
    assert ratios[3] == pytest.approx(2 ** (1 / 4))


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


def measure(plan: Plan, true: CostModel) -> tuple[MeasuredTimes, float]:
    """Runs a plan in the world that ``true`` describes, where nobody disturbs anybody; times of modules and step."""
    times = {
        (p.module, phase): true.time_ms(p.module, phase, p.degree, p.quota) for p in plan.placements for phase in Phase
    }
    step = sum(max(times[p.module, phase] for p in stage.placements) for stage in plan.stages for phase in Phase)
    return times, step


def lost(sigma: float, seed: int) -> list[float]:
    """Share of the best step that is lost after each round; each module's phases are predicted wrong by a factor."""
    draw = random.Random(seed)

    def time_of(floor: float, work: float, error: float) -> Time:
        return lambda degree, quota: (floor + work / (degree * quota)) * error

    shapes = {name: (draw.uniform(0.1, 3), draw.uniform(3, 60)) for name in "abcdef"}
    edges = [("a", "d"), ("b", "e")]
    profile = profile_of({n: time_of(*s, 1.0) for n, s in shapes.items()}, num_slots=16, edges=edges)
    wrong = {name: time_of(*s, math.exp(draw.gauss(0, sigma))) for name, s in shapes.items()}
    true = CostModel.from_profile(profile)
    predicted = CostModel.from_profile(profile_of(wrong, num_slots=16, edges=edges))
    best_ms = solve(profile.graph, true, profile.device).predicted_ms
    cost: Cost = predicted
    steps = []
    for _ in range(3):
        plan = solve(profile.graph, cost, profile.device)
        measured, step_ms = measure(plan, true)
        steps.append(step_ms)
        cost = with_measured(cost, plan, measured)
    return [min(steps[: n + 1]) / best_ms - 1 for n in range(3)]


@pytest.mark.parametrize("sigma", [0.05, 0.1])
def test_two_rounds_recover_most_of_what_wrong_predictions_cost(sigma: float) -> None:
    first, second, third = (
        statistics.mean(column) for column in zip(*(lost(sigma, s) for s in range(16)), strict=True)
    )
    assert 0 <= third <= second <= first
    assert second <= 0.6 * first
    assert third <= 0.4 * first
