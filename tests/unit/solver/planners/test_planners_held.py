"""Comparison planners under memory that modules keep across waves: other devices, or a reason."""

from __future__ import annotations

from itertools import permutations

import pytest
from planning_cases import linear, profile_of

from mosaic.cost import CostModel
from mosaic.errors import InfeasibleError
from mosaic.graph import Part
from mosaic.profile import ModuleMemory, Profile
from mosaic.solver import SearchOptions
from mosaic.solver.compare import compare
from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners.draft import Job, PlannerSettings
from mosaic.solver.planners.placing import within_memory
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
    return Job(parts=parts, option=option)


def whole(name: str, kept: int) -> Job:
    return job(Part(module=name), kept=kept)


def test_megatron_is_refused_where_every_device_would_keep_every_module() -> None:
    profile = made({"a": 60, "b": 60}, 100)
    with pytest.raises(InfeasibleError) as caught:
        planned("megatron", profile)
    assert "what megatron plans does not fit" in str(caught.value)
    assert "device 0 holds 120 bytes at its fullest and has 100" in caught.value.reasons[0]


def test_sequential_takes_lower_degrees_where_the_best_ones_do_not_fit() -> None:
    profile = made({"a": 60, "b": 60}, 100)
    schedule = planned("sequential", profile)
    assert [placed.devices for placed in schedule.plan.placements] in ([(0,), (1,)], [(1,), (0,)])


def test_jobs_move_to_devices_that_hold_them() -> None:
    waves = [(whole("a", 60), whole("b", 30)), (whole("c", 60), whole("d", 30))]
    homes = [[(0,), (1,)], [(0,), (1,)]]
    moved = within_memory("made by hand", waves, homes, Machine(num_devices=2, num_slots=2, memory_bytes=100))
    assert moved[0][0] != moved[1][0]
    assert moved[0][0] == moved[1][1]
    assert within_memory("made by hand", waves, homes, Machine(num_devices=2, num_slots=2, memory_bytes=120)) == homes


def test_jobs_of_several_waves_that_are_placed_anew_each_get_devices_of_their_own() -> None:
    """By hand: 11 + 7 and 10 + 8 bytes are the only pairs of two devices; swaps of numbers do not come to it."""
    kept = {"a": 11, "b": 10, "c": 8, "d": 7}
    machine = Machine(num_devices=2, num_slots=2, memory_bytes=18)
    for order in permutations(kept):
        waves = [(whole(name, kept[name]),) for name in order]
        found = within_memory("spindle", waves, [[(0,)]] * 4, machine)
        on = dict(zip(order, (homes[0] for homes in found), strict=True))
        assert on["a"] == on["d"] != on["b"] == on["c"], order


def test_jobs_that_leave_slots_free_still_have_their_devices_to_themselves() -> None:
    """One device has room for both jobs of the first wave, and the other then for the module that keeps most."""
    first = tuple(job(Part(module=name), kept=3, quota=1) for name in "ab")
    machine = Machine(num_devices=2, num_slots=2, memory_bytes=9)
    with pytest.raises(InfeasibleError, match="what distmm plans does not fit"):
        within_memory("distmm", [first, (whole("c", 9),)], [[(0,), (1,)], [(0,)]], machine)


def test_a_slice_keeps_its_share() -> None:
    half, rest = (Part(module="a", first=first, count=1, total=2) for first in (0, 1))
    waves = [(job(half, kept=90),), (job(rest, kept=90),), (whole("b", 10),)]
    homes = [[(0,)]] * 3
    assert within_memory("made by hand", waves, homes, Machine(num_devices=1, num_slots=2, memory_bytes=100)) == homes
    with pytest.raises(InfeasibleError, match="holds 100 bytes at its fullest and has 99"):
        within_memory("made by hand", waves, homes, Machine(num_devices=1, num_slots=2, memory_bytes=99))


def test_a_comparison_says_who_does_not_fit_and_counts_it_for_nothing() -> None:
    profile = made({"a": 60, "b": 60}, 100)
    cost = CostModel.from_profile(profile)
    rows = {row.method: row for row in compare(profile.graph, cost, profile.device, num_devices=2)}
    assert rows["megatron"].plan is None
    assert "holds 120 bytes at its fullest" in rows["megatron"].reason
    assert rows["exact"].plan is not None
    assert rows["exact"].ratio == 1.0
    free = compare(
        profile.graph,
        cost,
        profile.device,
        num_devices=2,
        search=SearchOptions(hold_memory=False),
        methods=("megatron",),
    )
    assert free[0].plan is not None
