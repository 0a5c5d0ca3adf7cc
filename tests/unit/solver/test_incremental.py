"""Plans made from earlier ones: where the search starts, what it takes over, what it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from planning_cases import device_of, flat, graph_of, linear, profile_of

from bench.solver.generate import Recipe, generate
from bench.solver.parts import without
from mosaic.cost import CostModel
from mosaic.errors import InfeasibleError
from mosaic.plan import plan_from_quotas
from mosaic.profile import ModuleMemory
from mosaic.solver import QuotaGrid, SearchOptions, solve
from mosaic.solver.exact.search import SearchHint, SearchLimits, search_exactly
from mosaic.solver.instances.checker import check_plan
from mosaic.solver.instances.instance import Instance, Pin
from mosaic.solver.instances.instance_cost import TableCost
from mosaic.solver.options import all_options
from mosaic.solver.replan.remembered import Remembered, SaysWhatItKnows
from mosaic.solver.replan.replanner import MIN_EFFORT, Replanner, start_from, warm_limits
from mosaic.solver.solve import find_solution
from mosaic.solver.stage import Machine
from mosaic.solver.stagger import Stagger, stagger

TIMES = {"a": linear(9), "b": flat(5), "c": linear(7), "d": linear(4)}


def test_stages_stay_without_what_is_gone_and_what_is_new_comes_after_its_inputs() -> None:
    before = graph_of("abc", [("a", "c"), ("b", "c")])
    plan = plan_from_quotas([{"a": 1, "b": 1}, {"c": 2}], graph=before, device=device_of(2))
    after = graph_of("acz", [("a", "z"), ("a", "c")])
    assert start_from(plan, after) == (("a",), ("z",), ("c",))


def test_modules_that_depend_on_each_other_now_leave_their_stage() -> None:
    plan = plan_from_quotas([{"a": 1, "b": 1}], graph=graph_of("ab"), device=device_of(2))
    assert start_from(plan, graph_of("ab", [("b", "a")])) == (("b",), ("a",))


def test_a_replan_may_take_a_tenth_of_a_cold_search_and_a_least() -> None:
    assert MIN_EFFORT < warm_limits(10.0, num_modules=8, seed=0).effort <= 1.0
    assert warm_limits(0.001, num_modules=8, seed=0).effort == MIN_EFFORT
    assert warm_limits(0.001, num_modules=40, seed=0).effort == pytest.approx(0.2)


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
    search = SearchOptions(limits=SearchLimits(effort=0))
    hint = SearchHint(start=start_from(cold, profile.graph))
    warm = find_solution(profile.graph, cost, profile.device, search=search, hint=hint).plan
    assert warm.predicted_ms <= warm.sequential_ms


def test_only_what_is_new_is_worked_out_again() -> None:
    whole = generate(Recipe(shape="layered", num_modules=8, num_slots=6, seed=1))
    less = replace(whole, modules=whole.modules[:-1])
    memo = Remembered()
    given = {"device": whole.device, "num_devices": whole.num_devices, "remembered": memo}
    find_solution(less.graph, TableCost(less), **given)
    assert memo.num_listed == 7
    finished = memo.num_finished
    again = find_solution(less.graph, TableCost(less), **given).plan
    assert (memo.num_listed, memo.num_finished) == (7, finished)
    more = find_solution(whole.graph, TableCost(whole), **given).plan
    assert memo.num_listed == 8
    fresh = find_solution(whole.graph, TableCost(whole), device=whole.device, num_devices=whole.num_devices).plan
    assert more.stages == fresh.stages
    assert again.predicted_ms < more.predicted_ms


def test_a_cost_model_that_cannot_say_what_it_knows_is_asked_again_unless_it_is_the_same() -> None:
    profile = profile_of(TIMES, num_slots=4)
    memo = Remembered()
    given = {"device": profile.device, "num_devices": 1, "grid": QuotaGrid()}
    cost = CostModel.from_profile(profile)
    assert not isinstance(cost, SaysWhatItKnows)
    memo.begin(profile.graph, cost=cost, **given)
    memo.begin(graph_of("ab"), cost=cost, **given)
    assert memo.num_listed == 4
    memo.begin(graph_of("ab"), cost=CostModel.from_profile(profile), **given)
    assert memo.num_listed == 6


def test_a_replan_that_fails_leaves_the_plan_and_what_is_known() -> None:
    small = profile_of({"a": flat(1), "b": linear(4)}, num_slots=2)
    large = profile_of(
        {"a": flat(1), "b": linear(4), "c": flat(1)},
        num_slots=2,
        memory=[ModuleMemory(module="c", resident_bytes=200, activation_bytes=0)],
    )
    device = replace(small.device, memory_bytes=100)
    planner = Replanner(device=device)
    plan = planner.update(small.graph, CostModel.from_profile(small))
    with pytest.raises(InfeasibleError, match="'c' needs 200 bytes"):
        planner.update(large.graph, CostModel.from_profile(large))
    assert planner.plan is plan
    assert planner.update(small.graph, CostModel.from_profile(small)).stages == plan.stages


def test_slots_are_the_same_whether_stages_are_known_or_not() -> None:
    whole = generate(Recipe(shape="layered", num_modules=8, num_slots=6, seed=2))
    stages = solve(whole.graph, TableCost(whole), whole.device, num_devices=8).stages
    lists = [stages, stages[:2], (*stages[:1], *stages[2:]), stages[1:], stages]
    memo = Stagger(num_devices=8, num_slots=6)
    assert [memo.place(one) for one in lists] == [stagger(one, num_devices=8, num_slots=6) for one in lists]


def test_a_problem_that_was_proven_before_is_answered_without_a_search() -> None:
    whole = generate(Recipe(shape="star", num_modules=8, num_slots=6, seed=1))
    less = without(whole, whole.modules[3].name)
    planner = Replanner(device=whole.device, num_devices=whole.num_devices)
    first = planner.update(whole.graph, TableCost(whole))
    gone = planner.update(less.graph, TableCost(less))
    back = planner.update(whole.graph, TableCost(whole))
    assert min(first.search.num_evaluations, gone.search.num_evaluations) > 0
    assert (back.search.num_evaluations, back.search.status) == (0, "optimal")
    assert back.stages == first.stages
    assert planner.update(less.graph, TableCost(less)).stages == gone.stages


def pinned(instance: Instance) -> Instance:
    """The same with a first module that may have one degree only."""
    first, *others = instance.modules
    return replace(instance, modules=(replace(first, pin=Pin(degrees=(1,))), *others))


def ordered(instance: Instance) -> Instance:
    """The same with modules that wait for the first one, which nobody waited for."""
    first, second, third, *others = instance.modules
    waiting = [replace(one, after=(first.name,)) for one in (second, third)]
    return replace(instance, modules=(first, *waiting, *others))


@pytest.mark.parametrize("change", [pinned, ordered])
def test_what_was_proven_is_not_the_answer_once_anything_changed(change: Callable[[Instance], Instance]) -> None:
    before = generate(Recipe(shape="align", num_modules=6, num_devices=4, num_slots=6, seed=3, tight_memory=True))
    after = change(before)
    planner = Replanner(device=before.device, num_devices=before.num_devices)
    for now in (before, after, before, after):
        plan = planner.update(now.graph, TableCost(now), device=now.device, num_devices=now.num_devices)
        cold = solve(now.graph, TableCost(now), now.device, num_devices=now.num_devices, method="exact")
        assert (plan.search.status, cold.search.status) == ("optimal", "optimal")
        assert plan.predicted_ms == pytest.approx(cold.predicted_ms, rel=1e-6)
        assert check_plan(now, plan).is_valid


def test_answers_hold_for_one_grid_and_one_objective() -> None:
    one = generate(Recipe(shape="layered", num_modules=6, num_devices=4, num_slots=6, seed=3))
    memo = Remembered()
    given = {"device": one.device, "num_devices": one.num_devices}
    for search in (
        SearchOptions(),
        SearchOptions(grid=QuotaGrid(step_slots=3)),
        SearchOptions(),
        SearchOptions(objective="sum"),
    ):
        plan = find_solution(one.graph, TableCost(one), **given, search=search, remembered=memo).plan
        cold = solve(one.graph, TableCost(one), one.device, num_devices=one.num_devices, method="exact", search=search)
        assert plan.predicted_ms == pytest.approx(cold.predicted_ms)
        assert plan.search.status == cold.search.status


def test_a_plan_without_proof_is_proven_later() -> None:
    whole = generate(Recipe(shape="align", num_modules=9, num_slots=16, seed=0))
    less = without(whole, whole.modules[4].name)
    planner = Replanner(device=whole.device, num_devices=whole.num_devices)
    with pytest.raises(ValueError, match="update"):
        planner.prove()
    planner.update(whole.graph, TableCost(whole))
    rough = planner.update(less.graph, TableCost(less), limits=SearchLimits(effort=60, exact=False))
    assert rough.search.status == "feasible"
    assert planner.plan is rough
    proven = planner.prove()
    cold = solve(less.graph, TableCost(less), less.device, num_devices=less.num_devices, method="exact")
    assert (proven.search.status, planner.plan) == ("optimal", proven)
    assert rough.search.bound_ms <= proven.predicted_ms == pytest.approx(cold.predicted_ms)
    assert planner.prove() is proven
