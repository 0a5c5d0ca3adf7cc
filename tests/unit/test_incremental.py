"""Plans made from earlier ones: where the search starts, what it takes over, what it may take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_cases import device_of, flat, graph_of, linear, profile_of

from mosaic.cost import CostModel
from mosaic.plan import plan_from_quotas
from mosaic.solver import SearchOptions, solve
from mosaic.solver.exact import SearchHint, SearchLimits, search_exactly
from mosaic.solver.incremental import LEAST_SECONDS, Replanner, resolve, start_from, warm_limits
from mosaic.solver.options import all_options
from mosaic.solver.placement import Machine

TIMES = {"a": linear(9), "b": flat(5), "c": linear(7), "d": linear(4)}


def test_stages_stay_without_what_is_gone_and_what_is_new_comes_after_its_inputs() -> None:
    before = graph_of("abc", [("a", "c"), ("b", "c")])
    plan = plan_from_quotas([{"a": 1, "b": 1}, {"c": 2}], graph=before, device=device_of(2))
    after = graph_of("acz", [("a", "z"), ("a", "c")])
    assert start_from(plan, after) == (("a",), ("z",), ("c",))


def test_modules_that_depend_on_each_other_now_leave_their_stage() -> None:
    plan = plan_from_quotas([{"a": 1, "b": 1}], graph=graph_of("ab"), device=device_of(2))
    assert start_from(plan, graph_of("ab", [("b", "a")])) == (("b",), ("a",))


def test_a_plan_for_other_devices_starts_from_the_old_one() -> None:
    profile = profile_of(TIMES, num_slots=4, degrees=(1, 2))
    cost = CostModel.from_profile(profile)
    one = solve(profile.graph, cost, profile.device)
    two = resolve(one, profile.graph, cost, profile.device, num_devices=2)
    assert two.num_devices == 2
    assert two.predicted_ms == pytest.approx(solve(profile.graph, cost, profile.device, num_devices=2).predicted_ms)


def test_a_replan_may_take_a_tenth_of_a_cold_search_and_a_least() -> None:
    profile = profile_of({"a": flat(1)}, num_slots=1)
    plan = solve(profile.graph, CostModel.from_profile(profile), profile.device)
    slow = replace(plan, search=replace(plan.search, seconds=10.0))
    assert LEAST_SECONDS < warm_limits(slow).seconds <= 1.0
    assert warm_limits(replace(plan, search=replace(plan.search, seconds=0.001))).seconds == LEAST_SECONDS


def test_what_is_known_answers_without_evaluating_a_stage_again() -> None:
    profile = profile_of(TIMES, num_slots=4)
    cost = CostModel.from_profile(profile)
    options = all_options(profile.graph, cost=cost, device=profile.device, num_devices=1)
    machine = Machine(num_devices=1, num_slots=4, memory_bytes=0)
    cold = search_exactly(profile.graph, options, cost=cost, machine=machine)
    warm = search_exactly(profile.graph, options, cost=cost, machine=machine, hint=SearchHint(known=cold.known))
    assert cold.record.num_evaluations > 0
    assert warm.record.num_evaluations == 0
    assert warm.cost_ms == cold.cost_ms
    other = replace(machine, num_slots=4, num_devices=2)
    elsewhere = search_exactly(profile.graph, options, cost=cost, machine=other, hint=SearchHint(known=cold.known))
    assert elsewhere.record.num_evaluations > 0


def test_changed_costs_are_noticed() -> None:
    first, second = profile_of(TIMES, num_slots=4), profile_of({**TIMES, "a": linear(90)}, num_slots=4)
    planner = Replanner(device=first.device, search=SearchOptions())
    planner.update(first.graph, CostModel.from_profile(first))
    cost = CostModel.from_profile(second)
    plan = planner.update(second.graph, cost)
    assert plan is planner.plan
    assert plan.predicted_ms == pytest.approx(solve(second.graph, cost, second.device).predicted_ms)


def test_a_start_that_is_no_partition_is_refused() -> None:
    profile = profile_of(TIMES, num_slots=4)
    cost = CostModel.from_profile(profile)
    options = all_options(profile.graph, cost=cost, device=profile.device, num_devices=1)
    machine = Machine(num_devices=1, num_slots=4, memory_bytes=0)
    for start in ([["a"]], [["a", "b"], ["b", "c", "d"]]):
        with pytest.raises(ValueError, match="start"):
            search_exactly(profile.graph, options, cost=cost, machine=machine, hint=SearchHint(start=start))


def test_no_time_still_gives_a_plan() -> None:
    profile = profile_of(TIMES, num_slots=4)
    cost = CostModel.from_profile(profile)
    cold = solve(profile.graph, cost, profile.device)
    search = SearchOptions(limits=SearchLimits(seconds=0))
    warm = resolve(cold, profile.graph, cost, profile.device, search=search)
    assert warm.predicted_ms <= warm.sequential_ms
