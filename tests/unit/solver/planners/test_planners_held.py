"""Comparison planners under memory that modules keep across waves: other devices, "not found", or a proof."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, permutations, product

import pytest
from planning_cases import Time, flat, graph_of, linear, profile_of

from mosaic.cost import CostModel
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.graph import Part
from mosaic.profile import ModuleMemory, Profile
from mosaic.solver import SearchOptions
from mosaic.solver.compare import compare
from mosaic.solver.exact.brute_force import enumerate_held_plans
from mosaic.solver.options import DeploymentOption, all_options
from mosaic.solver.planners.draft import DraftWave, Job, PlannerSettings, Sheet, whole_device_widths
from mosaic.solver.planners.placing import find_homes, is_proven_homeless
from mosaic.solver.solve import Solution, find_solution
from mosaic.solver.stage import Machine

WHOLE = PlannerSettings()


def made(kept: dict[str, int], memory_bytes: int, degrees: tuple[int, ...] = (1, 2), **more: object) -> Profile:
    memory = [ModuleMemory(module=name, resident_bytes=own, activation_bytes=0) for name, own in kept.items()]
    times = more.pop("times", dict.fromkeys(kept, linear(8)))
    return profile_of(times, num_slots=2, degrees=degrees, memory=memory, memory_bytes=memory_bytes, **more)


def planned(name: str, profile: Profile, num_devices: int = 2, settings: PlannerSettings = WHOLE) -> Solution:
    cost, search = CostModel.from_profile(profile), SearchOptions(planners=settings)
    return find_solution(profile.graph, cost, profile.device, num_devices=num_devices, method=name, search=search)


def job(*parts: Part, kept: int, quota: int = 2) -> Job:
    option = DeploymentOption(degree=1, quota=quota, forward_ns=1, backward_ns=1, memory_bytes=kept, kept_bytes=kept)
    return Job(parts=parts, options=(option,) * len(parts))


def whole(name: str, kept: int) -> Job:
    return job(Part(module=name), kept=kept)


def homes_of(waves: Sequence[DraftWave], machine: Machine, settings: PlannerSettings = WHOLE):
    names = dict.fromkeys(name for wave in waves for one in wave for name in one.names)
    cost = CostModel.from_profile(profile_of(dict.fromkeys(names, flat(1)), num_slots=2))
    sheet = Sheet(graph=graph_of(names), widths={}, cost=cost, machine=machine, settings=settings)
    return find_homes(waves, sheet, is_held=True)


def on(num_devices: int, memory_bytes: int) -> Machine:
    return Machine(num_devices=num_devices, num_slots=2, memory_bytes=memory_bytes)


def test_megatron_takes_the_best_degree_that_devices_hold() -> None:
    found = planned("megatron", made({"a": 60, "b": 60}, 100))  # both devices would keep both modules
    assert [placed.devices for placed in found.plan.placements] in ([(0,), (1,)], [(1,), (0,)])
    assert found.predicted_ms == pytest.approx(2 * (4 + 4))


def test_megatron_is_infeasible_only_where_no_degree_fits() -> None:
    """By hand: 65, 60 and 41 on one device each do not fit, nor 35 + 60 + 41 on both; b alone on both does."""
    memory = [
        ModuleMemory(module=name, resident_bytes=own, activation_bytes=works)
        for name, own, works in (("b", 5, 60), ("c", 60, 0), ("d", 41, 0))
    ]
    profile = profile_of(dict.fromkeys("bcd", linear(8)), num_slots=2, degrees=(1, 2), memory=memory, memory_bytes=100)
    with pytest.raises(InfeasibleError, match="nothing that megatron can plan fits"):
        planned("megatron", profile)
    assert {p.module: p.degree for p in planned("distmm", profile).plan.placements} == {"b": 2, "c": 1, "d": 1}
    status = {
        row.method: row.status
        for row in compare(profile.graph, CostModel.from_profile(profile), profile.device, num_devices=2)
    }
    assert (status["megatron"], status["distmm"], status["exact"]) == ("infeasible", "feasible", "optimal")


def test_a_planner_whose_own_choice_does_not_fit_has_found_none_and_proven_nothing() -> None:
    profile = made({"a": 60, "b": 60}, 100, edges=["ab"])  # each would have both devices
    with pytest.raises(UndecidedError, match="no devices were found that hold what spindle-optimus plans"):
        planned("spindle-optimus", profile)
    rows = compare(profile.graph, CostModel.from_profile(profile), profile.device, num_devices=2)
    status = {row.method: row.status for row in rows}
    assert status["spindle-optimus"] == "not found"
    assert status["megatron"] == status["distmm"] == "feasible"
    assert status["exact"] == "optimal"


def test_sequential_takes_lower_degrees_where_the_best_ones_do_not_fit() -> None:
    profile = made({"a": 60, "b": 60}, 100)
    schedule = planned("sequential", profile)
    assert [placed.devices for placed in schedule.plan.placements] in ([(0,), (1,)], [(1,), (0,)])


@pytest.mark.parametrize("seed", range(12))
def test_distmm_and_megatron_are_what_trying_everything_finds_where_memory_is_tight(seed: int) -> None:
    draw = random.Random(seed)
    names = "abcd"[: draw.randint(2, 4)]
    kept = {name: draw.randint(1, 12) for name in names}
    edges = [pair for pair in combinations(names, 2) if draw.random() < 0.3]
    times = {name: scaling(draw.uniform(0, 2), draw.uniform(1, 9)) for name in names}
    memory_bytes = max(*kept.values(), draw.randint(sum(kept.values()) // 2, sum(kept.values())))
    profile = made(kept, memory_bytes, times=times, edges=edges)
    cost = CostModel.from_profile(profile)
    options = all_options(profile.graph, cost=cost, device=profile.device, num_devices=2)
    widths = {name: whole_device_widths(own) for name, own in options.items()}
    try:
        every = enumerate_held_plans(profile.graph, widths, cost=cost, machine=on(2, memory_bytes))
    except InfeasibleError:
        for name in ("distmm", "megatron"):
            with pytest.raises(InfeasibleError):
                planned(name, profile)
        return
    best_ms = sum(
        max(o.forward_ns for o, _ in stage.choices.values()) + max(o.backward_ns for o, _ in stage.choices.values())
        for stage in every.stages
    )
    assert planned("distmm", profile).predicted_ms == pytest.approx(best_ms / 1e6)
    ways = [
        sum(2 * times[name](degree, 2) for name in names)
        for degree, fits in ((1, splits(kept, memory_bytes)), (2, sum(kept.values()) <= memory_bytes))
        if fits
    ]
    assert planned("megatron", profile).predicted_ms == pytest.approx(min(ways))


def scaling(fixed: float, work: float) -> Time:
    return lambda degree, quota: fixed + work / degree


def splits(kept: dict[str, int], memory_bytes: int) -> bool:
    """Whether modules, each on one of two devices, fit."""
    return any(
        all(sum(n for n, at in zip(kept.values(), sides, strict=True) if at == d) <= memory_bytes for d in (0, 1))
        for sides in product((0, 1), repeat=len(kept))
    )


def test_jobs_move_to_devices_that_hold_them() -> None:
    waves = [(whole("a", 60), whole("b", 30)), (whole("c", 60), whole("d", 30))]
    found = homes_of(waves, on(2, 100))
    assert found is not None
    assert found[0][0] != found[1][0]
    assert found[0][0] == found[1][1]


def test_jobs_before_one_that_finds_no_room_are_placed_anew() -> None:
    """The slices of a would stay on one device, and only their share of each leaves room for c."""
    slices = [job(Part(module="a", first=first, count=1, total=2), kept=8) for first in (0, 1)]
    waves = [(slices[0],), (slices[1],), (whole("c", 9), whole("d", 2))]
    found = homes_of(waves, on(2, 10))
    assert found is not None
    assert found[0] == found[1] == [(0,)]
    assert found == [[(0,)], [(0,)], [(1,), (0,)]]
    kept = [0, 0]
    for wave, homes in zip(waves, found, strict=True):
        for one, devices in zip(wave, homes, strict=True):
            kept[devices[0]] += one.kept_bytes
    assert max(kept) <= 10


def test_jobs_of_several_waves_that_are_placed_anew_each_get_devices_of_their_own() -> None:
    """By hand: 11 + 7 and 10 + 8 bytes are the only pairs of two devices."""
    kept = {"a": 11, "b": 10, "c": 8, "d": 7}
    for order in permutations(kept):
        found = homes_of([(whole(name, kept[name]),) for name in order], on(2, 18))
        at = dict(zip(order, (homes[0] for homes in found), strict=True))
        assert at["a"] == at["d"] != at["b"] == at["c"], order


def test_jobs_that_leave_slots_free_still_have_their_devices_to_themselves() -> None:
    """One device has room for both jobs of the first wave, and the other then for the module that keeps most."""
    first = tuple(job(Part(module=name), kept=3, quota=1) for name in "ab")
    waves = [first, (whole("c", 9),)]
    assert homes_of(waves, on(2, 9)) is None
    assert not is_proven_homeless(waves, on(2, 9))  # with a wave for each there were devices
    assert is_proven_homeless([*waves, (whole("d", 4),)], on(2, 9))


def test_a_slice_keeps_its_share() -> None:
    half, rest = (Part(module="a", first=first, count=1, total=2) for first in (0, 1))
    waves = [(job(half, kept=90),), (job(rest, kept=90),), (whole("b", 10),)]
    assert homes_of(waves, on(1, 100)) == [[(0,)]] * 3
    assert homes_of(waves, on(1, 99)) is None
    assert is_proven_homeless(waves, on(1, 99))


def test_placing_in_a_row_takes_consecutive_devices_and_moves_only_for_memory() -> None:
    settings = PlannerSettings(placement="sequential")
    waves = [(whole("a", 60), whole("b", 30)), (whole("c", 60), whole("d", 30))]
    assert homes_of(waves, on(2, 120), settings) == [[(0,), (1,)], [(0,), (1,)]]
    moved = homes_of(waves, on(2, 100), settings)
    assert moved is not None
    assert moved[0][0] != moved[1][0]
