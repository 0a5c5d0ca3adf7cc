"""The comparison planners on cases worked out by hand, and what each of them refuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from planning_cases import Time, flat, linear, profile_of

from mosaic.cost import CostModel
from mosaic.errors import InvalidPlanError
from mosaic.profile import ModuleMemory, Profile
from mosaic.simulate.step import simulate
from mosaic.solver.exact.search import SearchLimits
from mosaic.solver.options import DeploymentOption, all_options
from mosaic.solver.planners.draft import PlannerSettings, whole_device_widths
from mosaic.solver.planners.optimus import Way, by_marginal_gain
from mosaic.solver.planners.spindle import contract
from mosaic.solver.solve import Solution, find_solution
from mosaic.solver.task import SearchOptions

PLANNERS = ("sequential", "megatron", "distmm", "distmm-mt", "spindle", "spindle-seq", "spindle-optimus")


def seven_three(degree: int, quota: int) -> float:
    """The Spindle paper's example: T(1) : T(2) = 7 : 3, for twelve operators and one phase."""
    return {1: 42.0, 2: 18.0}[degree]


def by_degree(*times: float) -> Time:
    return lambda degree, quota: times[min(degree, len(times)) - 1]


def solved(profile: Profile, name: str, num_devices: int, *, hold_memory: bool = True, **settings: object) -> Solution:
    settings.setdefault("default_layers", 12)
    search = SearchOptions(hold_memory=hold_memory, planners=PlannerSettings(**settings))
    cost = CostModel.from_profile(profile)
    return find_solution(profile.graph, cost, profile.device, num_devices=num_devices, method=name, search=search)


def planned(
    name: str,
    times: dict[str, Time],
    num_devices: int,
    *,
    edges: Iterable[tuple[str, str]] = (),
    degrees: Sequence[int] = (1, 2, 3, 4),
    **settings: object,
) -> Solution:
    profile = profile_of(times, num_slots=1, degrees=degrees, edges=edges)
    return solved(profile, name, num_devices, **settings)


def stages_of(found: Solution) -> list[dict[str, int]]:
    """Degree of each module, stage after stage."""
    return [{placed.module: placed.degree for placed in stage.placements} for stage in found.plan.stages]


def counts_of(found: Solution) -> list[list[tuple[str, int, int]]]:
    """Module, first layer and layers of each part, stage after stage."""
    return [[(p.module, p.part.first, p.part.count) for p in stage.placements] for stage in found.plan.stages]


def test_megatron_runs_every_module_in_turn_at_the_best_one_degree() -> None:
    times = {"a": linear(8), "b": flat(2), "c": by_degree(6, 3, 3, 5)}
    found = planned("megatron", times, 4, edges=[("c", "a")])
    assert [placed.devices for placed in found.plan.placements] == [(0, 1, 2)] * 3  # all four: 2 + 5 + 2
    assert [placed.module for placed in found.plan.placements] == ["b", "c", "a"]
    assert found.predicted_ms == pytest.approx(2 * (2 + 3 + 8 / 3))


def test_spindle_seq_runs_every_module_on_all_devices_task_after_task() -> None:
    times = {"a": linear(8), "b": flat(2), "c": by_degree(6, 3, 3, 5)}
    found = planned("spindle-seq", times, 4, tasks=(("a", "c"), ("b",)))
    assert [placed.devices for placed in found.plan.placements] == [(0, 1, 2, 3)] * 3
    assert [placed.module for placed in found.plan.placements] == ["a", "c", "b"]
    assert found.predicted_ms == pytest.approx(2 * (2 + 2 + 5))


GAINS = {"slow": by_degree(10, 9.9, 9.8), "gains": linear(8)}


@pytest.mark.parametrize(
    ("name", "times", "num_devices", "more", "stages", "step_ms"),
    [
        pytest.param("megatron", {"a": linear(8)}, 3, {"degrees": (1, 2)}, [{"a": 2}], 8, id="the largest degree"),
        # Eight devices for 5 : 3; with powers of two alone it is four each, which takes 10 / 4.
        pytest.param(
            "distmm",
            {"a": lambda d, q: 10 / d if d < 6 else 2, "b": lambda d, q: 6 / d if d < 4 else 2},
            8,
            {"degrees": (1, 2, 3, 4, 5, 8)},
            [{"a": 5, "b": 3}],
            2 * 2,
            id="any whole number of devices",
        ),
        pytest.param(
            "distmm",
            {"a": linear(8), "b": linear(4), "c": flat(3), "head": linear(8)},
            4,
            {"edges": [(name, "head") for name in "abc"]},
            [{"a": 2, "b": 1, "c": 1}, {"head": 4}],
            2 * (4 + 2),
            id="parallel modules are balanced over whole devices",
        ),
        # The flat module decides: the other could do with two devices, and gets four of the five that are free.
        pytest.param(
            "distmm",
            {"a": linear(8), "b": flat(5)},
            6,
            {"degrees": (1, 2, 4)},
            [{"a": 4, "b": 1}],
            2 * 5,
            id="devices left over go to a module that gains",
        ),
        pytest.param(
            "distmm",
            {"a": flat(5), "b": flat(1), "c": flat(4)},
            2,
            {},
            [{"a": 1, "c": 1}, {"b": 1}],
            2 * (5 + 1),
            id="waves have modules of like length",
        ),
        pytest.param(
            "distmm",
            {"a": linear(12), "b": flat(3), "c": flat(3)},
            2,
            {},
            [{"a": 2}, {"b": 1, "c": 1}],
            2 * (6 + 3),
            id="balanced waves where they are faster",
        ),
        pytest.param("spindle-optimus", GAINS, 4, {}, [{"slow": 1, "gains": 3}], 2 * 10, id="to the largest gain"),
        pytest.param("distmm", GAINS, 4, {}, [{"slow": 3, "gains": 1}], 2 * 9.8, id="to the slowest"),
    ],
)
def test_stages_and_degrees_are_those_worked_out_by_hand(
    name: str, times: dict[str, Time], num_devices: int, more: dict, stages: list[dict[str, int]], step_ms: float
) -> None:
    found = planned(name, times, num_devices, **more)
    assert stages_of(found) == stages
    assert found.predicted_ms == pytest.approx(step_ms)


def test_distmm_makes_waves_where_memory_needs_more_devices_than_there_are() -> None:
    memory = [ModuleMemory(module=name, resident_bytes=0, activation_bytes=120) for name in "ab"]
    times = {"a": linear(8), "b": linear(8)}
    profile = profile_of(times, num_slots=1, degrees=(1, 2, 4), memory=memory, memory_bytes=40)
    assert stages_of(solved(profile, "distmm", 4, hold_memory=False)) == [{"a": 4}, {"b": 4}]


def test_distmm_takes_several_stages_where_that_is_faster_even_if_all_fit_side_by_side() -> None:
    found = planned("distmm", {"a": linear(12), "b": flat(1), "c": flat(1)}, 3)  # one stage takes 24
    assert sorted(map(sorted, stages_of(found))) == [["a"], ["b", "c"]]
    assert found.predicted_ms == pytest.approx(2 * (4 + 1))


def test_distmm_puts_modules_of_unlike_depth_into_one_stage() -> None:
    found = planned("distmm", {"a": flat(1), "c": flat(4), "d": flat(4)}, 2, edges=["ad"])
    assert stages_of(found) == [{"a": 1}, {"c": 1, "d": 1}]  # level by level: a beside c, then d


def test_distmm_mt_plans_each_task_by_itself_one_after_the_other() -> None:
    times = dict.fromkeys("abcd", flat(3))
    tasks = (("a", "b"), ("c", "d"))
    assert stages_of(planned("distmm", times, 4)) == [dict.fromkeys("abcd", 1)]
    assert stages_of(planned("distmm-mt", times, 4, tasks=tasks)) == [{"a": 1, "b": 1}, {"c": 1, "d": 1}]
    assert stages_of(planned("distmm-mt", times, 4)) == stages_of(planned("distmm", times, 4))


def test_distmm_says_where_its_plan_is_not_proven_best_of_its_kind(caplog: pytest.LogCaptureFixture) -> None:
    profile = profile_of({name: linear(5) for name in "abcde"}, num_slots=1, degrees=(1, 2, 3))
    cost = CostModel.from_profile(profile)
    search = SearchOptions(limits=SearchLimits(effort=0))
    found = find_solution(profile.graph, cost, profile.device, num_devices=3, method="distmm", search=search)
    assert found.plan.search.status == "feasible"
    assert "is not proven best with effort 0" in caplog.text


def test_the_largest_gain_of_spindle_optimus_is_that_for_each_device() -> None:
    def ways(*times_ns: int) -> list[Way]:
        options = [
            DeploymentOption(degree=degree, quota=1, forward_ns=time_ns, backward_ns=0)
            for degree, time_ns in enumerate(times_ns, start=1)
        ]
        return [Way(degree=option.degree, options=(option,)) for option in options]

    first, _, _, last = ways(10, 9, 9, 4)  # 6 for three devices more; b has 3 for one
    wave = by_marginal_gain({("a",): [first, last], ("b",): ways(6, 3)}, 5)
    assert {job.names: job.degree for job in wave} == {("a",): 1, ("b",): 2}
    assert {job.degree for job in by_marginal_gain({("a",): [first, last], ("b",): ways(6, 5)}, 5)} == {4, 1}


def test_spindle_optimus_gives_tasks_devices_and_runs_their_modules_in_turn() -> None:
    # The task of a and b takes 12 + 2, that of c 6; the third device brings 6 to the first, 3 to the second.
    times = {"a": by_degree(12, 6), "b": flat(2), "c": by_degree(6, 3)}
    found = planned("spindle-optimus", times, 3, edges=["ab"], tasks=(("a", "b"), ("c",)))
    assert stages_of(found) == [{"a": 2, "c": 1}, {"b": 1}]
    assert found.plan.placement("b").devices[0] in found.plan.placement("a").devices
    assert found.predicted_ms == pytest.approx(2 * (6 + 2))


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ((("a",),), "name each module once: a, b"),
        ((("a", "b"), ("b",)), "name each module once: a, b"),
        ((("a",), ("b",)), "a of one task feeds b of another"),
    ],
)
def test_tasks_that_are_none_of_a_graph_are_refused(tasks: tuple[tuple[str, ...], ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        planned("distmm-mt", {"a": flat(1), "b": flat(2)}, 2, edges=["ab"], tasks=tasks)


def test_spindle_allocates_by_its_own_estimate_and_is_predicted_by_the_cost_model() -> None:
    # Times are 12 / n but at 3, where they are worse than at 2: the estimate does not see it.
    bad_at_three = lambda degree, quota: {3: 6.5}.get(degree, 12 / degree)  # noqa: E731
    times = {"a": bad_at_three, "b": lambda degree, quota: 4.0 / degree}
    exact = planned("spindle", times, 4)
    estimated = planned("spindle", times, 4, estimator="alpha-beta")
    assert {p.degree for p in estimated.plan.placements if p.module == "a"} >= {3}
    assert {p.degree for p in exact.plan.placements if p.module == "a"} <= {2, 4}
    placed = next(p for p in estimated.plan.placements if p.degree == 3)
    assert placed.forward_ms == pytest.approx(placed.part.share * 6.5)


def test_spindle_slices_the_papers_example_over_three_waves() -> None:
    schedule = planned("spindle", {"a": seven_three, "b": seven_three}, 3, degrees=(1, 2))
    assert counts_of(schedule) == [[("a", 0, 8), ("b", 0, 3)], [("a", 8, 3), ("b", 3, 8)], [("a", 11, 1), ("b", 11, 1)]]
    assert schedule.plan.sliced == ("a", "b")
    assert schedule.plan.stages[0].forward_ms == pytest.approx(8 / 12 * 18)
    assert schedule.predicted_ms == pytest.approx(24 + 24 + 7)  # the continuous optimum is 50.4


def test_spindle_with_equation_11_splits_the_same_example_in_halves() -> None:
    schedule = planned("spindle", {"a": seven_three, "b": seven_three}, 3, degrees=(1, 2), interpolation="time")
    assert [count for _, _, count in counts_of(schedule)[0]] == [6, 3]


def test_every_slice_pays_its_overhead_in_both_phases() -> None:
    times = {"a": seven_three, "b": seven_three}
    plain, dear = (planned("spindle", times, 3, degrees=(1, 2), slice_overhead_ms=ms) for ms in (0.0, 1.0))
    assert dear.predicted_ms == pytest.approx(plain.predicted_ms + 2 * 3)


def test_a_whole_module_pays_no_overhead_for_slices() -> None:
    assert planned("spindle", {"a": linear(4)}, 2, slice_overhead_ms=9.0).predicted_ms == pytest.approx(4.0)


def test_spindle_contracts_a_chain_of_equal_modules() -> None:
    # a, b: one MetaOp of 24 operators beside c, 1.5 devices each: 17 on two devices take 51 and 7 on one take 49, so
    # 16 of the chain run beside the latter.
    times = {"a": seven_three, "b": seven_three, "c": lambda d, q: 2 * seven_three(d, q)}
    schedule = planned("spindle", times, 3, degrees=(1, 2), edges=["ab"], num_layers={"c": 24})
    first, second = counts_of(schedule)[:2]
    assert first[0] == ("a", 0, 12)
    assert second == [("b", 0, 4)]
    chain = [schedule.plan.stages[index].placements[0] for index in (0, 1)]
    assert chain[0].devices == chain[1].devices
    assert sum(placed.forward_ms for placed in chain) == pytest.approx(18 * 16 / 12)


@pytest.mark.parametrize(
    ("times", "edges", "layers"),
    [
        ({"a": linear(4), "b": linear(5), "c": flat(9)}, ["ab"], {}),  # other options
        ({"a": linear(4), "b": linear(4), "c": linear(4)}, ["ab", "ac"], {}),  # a feeds two
        ({"a": linear(4), "b": linear(4), "c": linear(4)}, ["ac", "bc"], {}),  # c is fed by two
        ({"a": linear(4), "b": linear(4), "c": flat(9)}, ["ab"], {"b": 3}),  # other layers
    ],
)
def test_spindle_contracts_nothing_else(times: dict[str, Time], edges: list[str], layers: dict[str, int]) -> None:
    profile = profile_of(times, num_slots=1, degrees=(1, 2, 3, 4), edges=edges)
    cost = CostModel.from_profile(profile)
    options = all_options(profile.graph, cost=cost, device=profile.device, num_devices=2)
    widths = {name: whole_device_widths(own) for name, own in options.items()}
    found = contract(profile.graph, widths, PlannerSettings(num_layers=layers, default_layers=12))
    assert all(len(chain.modules) == 1 for level in found for chain in level)


def test_a_chain_alone_in_its_wave_is_a_stage_for_each_module() -> None:
    schedule = planned("spindle", {"a": linear(4), "b": linear(4)}, 2, edges=["ab"], degrees=(1, 2))
    assert [stage.names for stage in schedule.plan.stages] == [("a",), ("b",)]
    assert schedule.plan.predicted_ms == pytest.approx(schedule.predicted_ms)


def test_a_chain_beside_another_module_is_stages_that_no_barrier_ends() -> None:
    kind = by_degree(4, 2)
    times = {"a": kind, "b": kind, "c": by_degree(8, 4)}
    profile = profile_of(times, num_slots=1, degrees=(1, 2), edges=["ab"])
    schedule = solved(profile, "spindle", 2, default_layers=1)
    plan = schedule.plan
    assert stages_of(schedule) == [{"a": 1, "c": 1}, {"b": 1}]
    assert plan.placement("a").devices == plan.placement("b").devices != plan.placement("c").devices
    assert simulate(plan, profile.graph).makespan_ms == pytest.approx(schedule.predicted_ms)
    assert plan.predicted_ms > schedule.predicted_ms


def test_levels_are_longest_paths_so_that_nothing_runs_beside_what_it_waits_for() -> None:
    # By breadth first, c would be on b's level.
    for name in PLANNERS:
        schedule = planned(name, {"a": flat(1), "b": flat(2), "c": flat(3)}, 4, edges=["ab", "bc", "ac"])
        assert [set(wave) for wave in stages_of(schedule)] == [{"a"}, {"b"}, {"c"}], name


def test_spindle_optimus_takes_turns_where_modules_do_not_fit() -> None:
    assert len(planned("spindle-optimus", dict.fromkeys("abc", flat(1)), 2).plan.stages) == 2


def test_jobs_stay_inside_an_island() -> None:
    times = {"a": linear(9), "b": linear(9)}
    schedule = planned("distmm", times, 8, degrees=(1, 2, 3), island_size=4)
    assert [placed.devices for placed in schedule.plan.stages[0].placements] == [(0, 1, 2), (4, 5, 6)]


def test_a_job_larger_than_an_island_takes_the_emptiest_ones() -> None:
    schedule = planned("distmm", {"a": linear(9)}, 8, degrees=(6,), island_size=4)
    assert schedule.plan.placement("a").devices == (0, 1, 2, 3, 4, 5)


def test_a_consumer_is_placed_on_its_producers_devices() -> None:
    times = {"a": linear(9), "b": linear(9), "c": linear(9), "d": linear(7)}
    schedule = planned("distmm", times, 8, degrees=(4,), edges=["bc", "ad"], island_size=4)
    home = {placed.module: placed.devices for placed in schedule.plan.placements}
    assert home["b"] == home["c"] != home["a"] == home["d"]


def test_among_free_devices_those_with_least_memory_taken_come_first() -> None:
    memory = [ModuleMemory(module=name, resident_bytes=9, activation_bytes=0) for name in "ab"]
    profile = profile_of({"a": flat(1), "b": flat(2)}, num_slots=1, memory=memory, memory_bytes=100)
    assert [placed.devices for placed in solved(profile, "megatron", 2).plan.placements] == [(0,), (1,)]


def test_a_plan_that_slices_nothing_is_run() -> None:
    times = {"a": linear(8), "b": linear(4), "head": linear(8)}
    profile = profile_of(times, num_slots=2, degrees=(1, 2, 4), edges=[("a", "head"), ("b", "head")])
    schedule = solved(profile, "distmm", 4)
    schedule.plan.check_matches(graph=profile.graph, device=profile.device)
    assert schedule.plan.predicted_ms == schedule.predicted_ms
    assert schedule.plan.search.method == "distmm"
    assert all(placement.quota == 2 for placement in schedule.plan.placements)


def test_a_plan_with_slices_is_not_run_and_says_which_modules() -> None:
    profile = profile_of({"a": seven_three, "b": seven_three}, num_slots=1, degrees=(1, 2))
    sliced = solved(profile, "spindle", 3).plan
    with pytest.raises(InvalidPlanError, match="the plan of spindle cuts a, b into parts, and whole modules are run"):
        sliced.check_matches(graph=profile.graph, device=profile.device)
    whole = solved(profile, "spindle", 3, default_layers=1).plan
    whole.check_matches(graph=profile.graph, device=profile.device)


def test_layers_of_a_module_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_layers names \['b'\]; the modules are a"):
        planned("spindle", {"a": flat(3)}, 1, num_layers={"b": 2})


@pytest.mark.parametrize(
    "settings",
    [
        {"default_layers": 0},
        {"num_layers": {"a": 0}},
        {"island_size": 0},
        {"slice_overhead_ms": -1.0},
        {"slice_overhead_ms": float("nan")},
        {"interpolation": "cubic"},
        {"estimator": "guess"},
        {"placement": "random"},
    ],
)
def test_senseless_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"at least 1|use '\w+' or|use 'cost' or"):
        PlannerSettings(**settings)
