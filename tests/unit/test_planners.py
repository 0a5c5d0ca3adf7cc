"""The comparison planners on cases worked out by hand, and what each of them refuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from planning_cases import Time, flat, graph_of, linear, profile_of

from mosaic.artifact import parse, to_json
from mosaic.cost import CostModel
from mosaic.errors import InfeasibleError, InvalidPlanError
from mosaic.plan import Plan
from mosaic.profile import ModuleMemory, Profile
from mosaic.solver import solve
from mosaic.solver.planners import PLANNERS, PlannerSettings, WavePlan, check_schedule, plan_with
from mosaic.solver.simulate import simulate


def seven_three(degree: int, quota: int) -> float:
    """The Spindle paper's example: T(1) : T(2) = 7 : 3, for twelve operators and one phase."""
    return {1: 42.0, 2: 18.0}[degree]


def by_degree(*times: float) -> Time:
    return lambda degree, quota: times[min(degree, len(times)) - 1]


def schedule_of(profile: Profile, name: str, num_devices: int, **settings: object) -> WavePlan:
    cost = CostModel.from_profile(profile)
    return plan_with(
        name, profile.graph, cost, profile.device, num_devices=num_devices, settings=PlannerSettings(**settings)
    )


def planned(
    name: str,
    times: dict[str, Time],
    num_devices: int,
    *,
    edges: Iterable[tuple[str, str]] = (),
    degrees: Sequence[int] = (1, 2, 3, 4),
    **settings: object,
) -> WavePlan:
    profile = profile_of(times, num_slots=1, degrees=degrees, edges=edges)
    return schedule_of(profile, name, num_devices, **settings)


def waves_of(schedule: WavePlan) -> list[dict[str, int]]:
    """Degree of each module, wave after wave."""
    return [{part.module: len(run.devices) for run in wave.runs for part in run.parts} for wave in schedule.waves]


def test_megatron_runs_every_module_on_all_devices_in_turn() -> None:
    schedule = planned("megatron", {"a": linear(8), "b": flat(2), "c": by_degree(3, 3, 3, 5)}, 4, edges=[("c", "a")])
    assert [wave.runs[0].devices for wave in schedule.waves] == [(0, 1, 2, 3)] * 3
    assert [part.module for part in schedule.parts] == ["b", "c", "a"]
    assert schedule.predicted_ms == pytest.approx(2 * (2 + 5 + 2))  # even where fewer devices were faster


def test_megatron_takes_the_largest_degree_that_there_is() -> None:
    assert waves_of(planned("megatron", {"a": linear(8)}, 3, degrees=(1, 2, 4))) == [{"a": 2}]


def test_sequential_runs_every_module_in_turn_at_its_own_best() -> None:
    schedule = planned("sequential", {"a": linear(8), "b": by_degree(2, 1, 3, 3)}, 4)
    assert waves_of(schedule) == [{"a": 4}, {"b": 2}]
    assert schedule.predicted_ms == schedule.sequential_ms == pytest.approx(2 * (2 + 1))


def test_sequential_is_the_plan_of_the_sequential_solver() -> None:
    profile = profile_of({"a": lambda d, q: 5.0 * q / d, "b": linear(6)}, num_slots=3, degrees=(1, 2), edges=["ab"])
    cost = CostModel.from_profile(profile)
    plan = solve(profile.graph, cost, profile.device, num_devices=2, method="sequential")
    schedule = plan_with("sequential", profile.graph, cost, profile.device, num_devices=2)
    assert schedule.as_plan(profile.graph).stages == plan.stages


def test_distmm_balances_parallel_modules_over_whole_devices() -> None:
    times = {"a": linear(8), "b": linear(4), "c": flat(3), "head": linear(8)}
    schedule = planned("distmm", times, 4, edges=[(name, "head") for name in "abc"])
    assert waves_of(schedule) == [{"a": 2, "b": 1, "c": 1}, {"head": 4}]
    assert schedule.predicted_ms == pytest.approx(2 * (4 + 2))


def test_distmm_gives_devices_left_over_to_a_module_that_gains() -> None:
    # The flat module decides: the other could do with two devices, and gets four of the five that are free.
    assert waves_of(planned("distmm", {"a": linear(8), "b": flat(5)}, 6, degrees=(1, 2, 4))) == [{"a": 4, "b": 1}]


def test_distmm_fills_waves_with_modules_of_like_length_where_they_do_not_fit() -> None:
    schedule = planned("distmm", {"a": flat(5), "b": flat(1), "c": flat(4)}, 2)
    assert [set(wave) for wave in waves_of(schedule)] == [{"a", "c"}, {"b"}]
    assert schedule.predicted_ms == pytest.approx(2 * (5 + 1))


def test_distmm_balances_waves_where_that_is_faster() -> None:
    schedule = planned("distmm", {"a": linear(12), "b": flat(3), "c": flat(3)}, 2)
    assert waves_of(schedule) == [{"a": 2}, {"b": 1, "c": 1}]
    assert schedule.predicted_ms == pytest.approx(2 * (6 + 3))


def test_distmm_makes_waves_where_memory_needs_more_devices_than_there_are() -> None:
    memory = [ModuleMemory(module=name, resident_bytes=0, activation_bytes=120) for name in "ab"]
    times = {"a": linear(8), "b": linear(8)}
    profile = profile_of(times, num_slots=1, degrees=(1, 2, 4), memory=memory, memory_bytes=40)
    assert waves_of(schedule_of(profile, "distmm", 4, hold_memory=False)) == [{"a": 4}, {"b": 4}]


def test_distmm_waves_tries_every_partition_even_where_all_fit_side_by_side() -> None:
    times = {"a": linear(12), "b": flat(1), "c": flat(1)}
    assert planned("distmm", times, 3).predicted_ms == pytest.approx(24)
    best = planned("distmm-waves", times, 3)
    assert sorted(map(sorted, waves_of(best))) == [["a"], ["b", "c"]]
    assert best.predicted_ms == pytest.approx(2 * (4 + 1))


def test_distmm_waves_is_distmm_on_levels_too_wide_to_partition() -> None:
    times = {"a": linear(12), "b": flat(1), "c": flat(1)}
    assert planned("distmm-waves", times, 3, max_partitioned=2).waves == planned("distmm", times, 3).waves


def test_spindle_slices_the_papers_example_over_three_waves() -> None:
    schedule = planned("spindle", {"a": seven_three, "b": seven_three}, 3, degrees=(1, 2))
    counts = [[(part.module, part.first, part.count) for part in parts_of(wave)] for wave in schedule.waves]
    assert counts == [[("a", 0, 8), ("b", 0, 3)], [("a", 8, 3), ("b", 3, 8)], [("a", 11, 1), ("b", 11, 1)]]
    assert schedule.sliced == ("a", "b")
    assert schedule.waves[0].forward_ms == pytest.approx(8 / 12 * 18)
    assert schedule.predicted_ms == pytest.approx(24 + 24 + 7)  # the continuous optimum is 50.4


def parts_of(wave: object) -> list:
    return [part for run in wave.runs for part in run.parts]


def test_spindle_with_equation_11_splits_the_same_example_in_halves() -> None:
    schedule = planned("spindle", {"a": seven_three, "b": seven_three}, 3, degrees=(1, 2), interpolation="time")
    assert [part.count for part in parts_of(schedule.waves[0])] == [6, 3]


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
    schedule = planned("spindle", times, 3, degrees=(1, 2), edges=["ab"], num_operators={"c": 24})
    first = schedule.waves[0].runs[0]
    assert [(part.module, part.first, part.count, part.total) for part in first.parts] == [
        ("a", 0, 12, 12),
        ("b", 0, 4, 12),
    ]
    assert first.forward_ms == pytest.approx(18 * 16 / 12)


@pytest.mark.parametrize(
    ("times", "edges", "operators"),
    [
        ({"a": linear(4), "b": linear(5), "c": flat(9)}, ["ab"], {}),  # other options
        ({"a": linear(4), "b": linear(4), "c": linear(4)}, ["ab", "ac"], {}),  # a feeds two
        ({"a": linear(4), "b": linear(4), "c": linear(4)}, ["ac", "bc"], {}),  # c is fed by two
        ({"a": linear(4), "b": linear(4), "c": flat(9)}, ["ab"], {"b": 3}),  # other operators
    ],
)
def test_spindle_contracts_nothing_else(times: dict[str, Time], edges: list[str], operators: dict[str, int]) -> None:
    schedule = planned("spindle", times, 2, edges=edges, num_operators=operators)
    assert all(len(run.parts) == 1 for wave in schedule.waves for run in wave.runs)


def test_a_chain_alone_in_its_wave_is_run_as_a_stage_for_each_module() -> None:
    profile = profile_of({"a": linear(4), "b": linear(4)}, num_slots=1, degrees=(1, 2), edges=["ab"])
    schedule = schedule_of(profile, "spindle", 2)
    assert len(schedule.waves) == 1
    plan = schedule.as_plan(profile.graph)
    assert [stage.names for stage in plan.stages] == [("a",), ("b",)]
    assert plan.predicted_ms == pytest.approx(schedule.predicted_ms)


def test_a_chain_beside_another_module_is_run_as_stages_that_no_barrier_ends() -> None:
    kind = by_degree(4, 2)
    times = {"a": kind, "b": kind, "c": by_degree(8, 4)}
    profile = profile_of(times, num_slots=1, degrees=(1, 2), edges=["ab"])
    schedule = schedule_of(profile, "spindle", 2, default_operators=1)
    assert waves_of(schedule) == [{"a": 1, "b": 1, "c": 1}]
    plan = schedule.as_plan(profile.graph)
    assert [stage.names for stage in plan.stages] == [("a", "c"), ("b",)]
    assert plan.placement("a").devices == plan.placement("b").devices != plan.placement("c").devices
    assert simulate(plan, profile.graph).makespan_ms == pytest.approx(schedule.predicted_ms)
    assert plan.predicted_ms > schedule.predicted_ms


def test_levels_are_longest_paths_so_that_nothing_runs_beside_what_it_waits_for() -> None:
    # By breadth first, c would be on b's level.
    for name in PLANNERS:
        schedule = planned(name, {"a": flat(1), "b": flat(2), "c": flat(3)}, 4, edges=["ab", "bc", "ac"])
        assert [set(wave) for wave in waves_of(schedule)] == [{"a"}, {"b"}, {"c"}]


def test_spindle_optimus_gives_devices_to_the_largest_gain_not_to_the_slowest() -> None:
    times = {"slow": by_degree(10, 9.9, 9.8), "gains": linear(8)}
    assert waves_of(planned("spindle-optimus", times, 4)) == [{"slow": 1, "gains": 3}]
    assert waves_of(planned("distmm", times, 4)) == [{"slow": 3, "gains": 1}]


def test_spindle_optimus_counts_gain_by_device() -> None:
    # 6 ms for three devices more, or 3 ms for one.
    times = {"a": lambda d, q: {1: 10.0, 4: 4.0}.get(d, 10.0), "b": by_degree(6, 3, 2.9, 2.8)}
    assert waves_of(planned("spindle-optimus", times, 5)) == [{"a": 1, "b": 4}]


def test_spindle_optimus_takes_turns_where_modules_do_not_fit() -> None:
    assert len(planned("spindle-optimus", dict.fromkeys("abc", flat(1)), 2).waves) == 2


def test_jobs_stay_inside_an_island() -> None:
    times = {"a": linear(9), "b": linear(9)}
    schedule = planned("distmm", times, 8, degrees=(1, 2, 3), island_size=4)
    assert [run.devices for run in schedule.waves[0].runs] == [(0, 1, 2), (4, 5, 6)]


def test_a_job_larger_than_an_island_takes_the_emptiest_ones() -> None:
    schedule = planned("distmm", {"a": linear(9)}, 8, degrees=(6,), island_size=4)
    assert schedule.waves[0].runs[0].devices == (0, 1, 2, 3, 4, 5)


def test_a_consumer_is_placed_on_its_producers_devices() -> None:
    times = {"a": linear(9), "b": linear(9), "c": linear(9), "d": linear(7)}
    schedule = planned("distmm", times, 8, degrees=(4,), edges=["bc", "ad"], island_size=4)
    home = {run.parts[0].module: run.devices for wave in schedule.waves for run in wave.runs}
    assert home["b"] == home["c"] != home["a"] == home["d"]


def test_among_free_devices_those_with_least_memory_taken_come_first() -> None:
    memory = [ModuleMemory(module=name, resident_bytes=9, activation_bytes=0) for name in "ab"]
    profile = profile_of({"a": flat(1), "b": flat(2)}, num_slots=1, memory=memory, memory_bytes=100)
    assert [wave.runs[0].devices for wave in schedule_of(profile, "megatron", 2).waves] == [(0,), (1,)]


def test_a_schedule_that_slices_nothing_becomes_a_plan() -> None:
    times = {"a": linear(8), "b": linear(4), "head": linear(8)}
    profile = profile_of(times, num_slots=2, degrees=(1, 2, 4), edges=[("a", "head"), ("b", "head")])
    schedule = schedule_of(profile, "distmm", 4)
    plan = schedule.as_plan(profile.graph)
    assert isinstance(plan, Plan)
    assert plan.predicted_ms == schedule.predicted_ms
    assert plan.search.method == "distmm"
    assert all(placement.quota == 2 for placement in plan.placements)


def test_a_schedule_with_slices_is_no_plan_and_says_which_modules() -> None:
    profile = profile_of({"a": seven_three, "b": seven_three}, num_slots=1, degrees=(1, 2))
    schedule = schedule_of(profile, "spindle", 3)
    assert not schedule.is_runnable
    with pytest.raises(InvalidPlanError, match="the spindle schedule cannot be run as a plan: it slices a, b"):
        schedule.as_plan(profile.graph)
    assert schedule_of(profile, "spindle", 3, default_operators=1).is_runnable


def test_a_schedule_for_another_graph_is_no_plan() -> None:
    schedule = planned("megatron", {"a": flat(1)}, 1)
    with pytest.raises(InvalidPlanError, match="the schedule was made for graph"):
        schedule.as_plan(graph_of("b"))


def test_spans_go_forward_wave_by_wave_and_back_in_reverse() -> None:
    schedule = planned("megatron", {"a": flat(2), "b": flat(3)}, 1)
    assert [(s.part.module, s.phase, s.start_ms, s.end_ms) for s in schedule.spans()] == [
        ("a", "forward", 0, 2),
        ("b", "forward", 2, 5),
        ("b", "backward", 5, 8),
        ("a", "backward", 8, 10),
    ]


def test_a_schedule_survives_json() -> None:
    schedule = planned("spindle", {"a": seven_three, "b": seven_three}, 3, degrees=(1, 2))
    assert parse(WavePlan, to_json(schedule), source="waves.json") == schedule


@pytest.mark.parametrize("name", PLANNERS)
def test_a_single_module_on_one_device_is_planned_by_all(name: str) -> None:
    assert planned(name, {"a": flat(3)}, 1).predicted_ms == pytest.approx(6.0)


@pytest.mark.parametrize("name", PLANNERS)
def test_no_devices_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="num_devices=0; a plan needs at least one device"):
        planned(name, {"a": flat(3)}, 0)


@pytest.mark.parametrize("name", PLANNERS)
def test_a_module_that_fits_nowhere_is_named(name: str) -> None:
    memory = [ModuleMemory(module="b", resident_bytes=500, activation_bytes=0)]
    profile = profile_of({"a": flat(1), "b": flat(1)}, num_slots=1, memory=memory, memory_bytes=100)
    with pytest.raises(InfeasibleError, match="'b' needs 500 bytes on each of its devices"):
        schedule_of(profile, name, 2)


def test_an_unknown_planner_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="name='magic' is not a comparison planner; use one of sequential, megatron"):
        planned("magic", {"a": flat(3)}, 1)


def test_operators_of_a_module_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_operators names \['b'\]; the modules are a"):
        planned("spindle", {"a": flat(3)}, 1, num_operators={"b": 2})


@pytest.mark.parametrize(
    "settings",
    [
        {"default_operators": 0},
        {"num_operators": {"a": 0}},
        {"island_size": 0},
        {"slice_overhead_ms": -1.0},
        {"slice_overhead_ms": float("nan")},
        {"interpolation": "cubic"},
    ],
)
def test_senseless_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"at least 1|use 'speedup'"):
        PlannerSettings(**settings)


def two_modules() -> WavePlan:
    return planned("megatron", {"a": flat(1), "b": flat(1)}, 2, edges=["ab"], degrees=(1,))


def test_a_schedule_out_of_order_is_refused() -> None:
    schedule = two_modules()
    with pytest.raises(InvalidPlanError, match="'b' starts in wave 0, before 'a'"):
        check_schedule(replace(schedule, waves=schedule.waves[::-1]), graph_of("ab", ["ab"]))


def test_a_schedule_that_leaves_a_module_out_is_refused() -> None:
    schedule = two_modules()
    with pytest.raises(InvalidPlanError, match=r"leaves out \['b'\]"):
        check_schedule(replace(schedule, waves=schedule.waves[:1]), graph_of("ab"))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([(0, 2, 3)], "runs 2 of its 3 operators"),
        ([(0, 2, 3), (1, 2, 3)], "goes on at operator 1 of 3 after 2"),
        ([(0, 2, 3), (2, 1, 4)], "goes on at operator 2 of 4 after 2"),
    ],
)
def test_a_schedule_that_runs_operators_twice_or_never_is_refused(
    slices: list[tuple[int, int, int]], message: str
) -> None:
    schedule = planned("megatron", {"a": flat(1)}, 1)
    run = schedule.waves[0].runs[0]
    parts = [replace(run.parts[0], first=first, count=count, total=total) for first, count, total in slices]
    waves = tuple(replace(schedule.waves[0], runs=(replace(run, parts=(part,)),)) for part in parts)
    with pytest.raises(InvalidPlanError, match=message):
        check_schedule(replace(schedule, waves=waves), graph_of("a"))


def test_two_parts_of_a_module_at_the_same_time_are_refused() -> None:
    schedule = planned("megatron", {"a": flat(1)}, 2, degrees=(1,))
    run = schedule.waves[0].runs[0]
    halves = tuple(
        replace(run, devices=(half,), parts=(replace(run.parts[0], first=half, count=1, total=2),)) for half in (0, 1)
    )
    wave = replace(schedule.waves[0], runs=halves)
    with pytest.raises(InvalidPlanError, match="two parts of 'a' run at the same time in wave 0"):
        check_schedule(replace(schedule, waves=(wave,)), graph_of("a"))


def test_a_wave_that_holds_a_device_twice_or_one_that_is_not_there_is_refused() -> None:
    schedule = two_modules()
    run = schedule.waves[0].runs[0]
    for runs, message in (
        ((run, schedule.waves[1].runs[0]), "gives each device to one run"),
        ((replace(run, devices=(2,)),), "has devices 0 to 1"),
        ((replace(run, quota=9),), "asks for a quota of 9 slots"),
        ((), "nothing to run"),
    ):
        with pytest.raises(InvalidPlanError, match=message):
            replace(schedule, waves=(replace(schedule.waves[0], runs=runs),))
