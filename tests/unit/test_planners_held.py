"""Comparison planners under memory that modules keep across waves: other devices, or a reason."""

from __future__ import annotations

from itertools import permutations

import pytest
from planning_cases import flat, linear, profile_of

from mosaic.cost import CostModel
from mosaic.errors import InfeasibleError
from mosaic.profile import ModuleMemory, Profile
from mosaic.solver import SearchOptions, solve
from mosaic.solver.compare import compare
from mosaic.solver.gahc.placement import Machine
from mosaic.solver.options import all_options
from mosaic.solver.planners import PLANNERS, PlannerSettings, WavePlan, plan_with
from mosaic.solver.planners.held_waves import within_memory
from mosaic.solver.planners.waves import Part, Run, Wave

WHOLE = PlannerSettings(default_operators=1)


def made(kept: dict[str, int], memory_bytes: int, degrees: tuple[int, ...] = (1, 2), **more: object) -> Profile:
    memory = [ModuleMemory(module=name, resident_bytes=own, activation_bytes=0) for name, own in kept.items()]
    times = more.pop("times", dict.fromkeys(kept, linear(8)))
    return profile_of(times, num_slots=2, degrees=degrees, memory=memory, memory_bytes=memory_bytes, **more)


def planned(name: str, profile: Profile, num_devices: int = 2, settings: PlannerSettings = WHOLE) -> WavePlan:
    cost = CostModel.from_profile(profile)
    return plan_with(name, profile.graph, cost, profile.device, num_devices=num_devices, settings=settings)


def held(schedule: WavePlan, profile: Profile) -> list[int]:
    """Recomputed: all that modules keep on each device; these keep all that they need."""
    cost = CostModel.from_profile(profile)
    found = [0.0] * schedule.num_devices
    for wave in schedule.waves:
        for run in wave.runs:
            for device in run.devices:
                found[device] += sum(cost.kept_bytes(p.module, len(run.devices)) * p.share for p in run.parts)
    return [round(one) for one in found]


def test_megatron_is_refused_where_every_device_would_keep_every_module() -> None:
    profile = made({"a": 60, "b": 60}, 100)
    with pytest.raises(InfeasibleError) as caught:
        planned("megatron", profile)
    assert "what megatron plans does not fit" in str(caught.value)
    assert "device 0 holds 120 bytes at its fullest and has 100" in caught.value.reasons[0]


def test_sequential_takes_lower_degrees_where_the_best_ones_do_not_fit() -> None:
    profile = made({"a": 60, "b": 60}, 100)
    schedule = planned("sequential", profile)
    assert [run.devices for wave in schedule.waves for run in wave.runs] in ([(0,), (1,)], [(1,), (0,)])
    exact = solve(profile.graph, CostModel.from_profile(profile), profile.device, num_devices=2, method="sequential")
    assert schedule.predicted_ms == pytest.approx(exact.predicted_ms)
    assert schedule.sequential_ms == pytest.approx(exact.sequential_ms)


def test_runs_move_to_devices_that_hold_them_and_take_as_long() -> None:
    names = {"a": 60, "b": 30, "c": 60, "d": 30}
    waves = tuple(
        Wave(
            runs=(
                Run(parts=(Part(module=first),), devices=(0,), quota=2),
                Run(parts=(Part(module=second),), devices=(1,), quota=2),
            )
        )
        for first, second in (("a", "b"), ("c", "d"))
    )
    profile = made(names, 100, degrees=(1,))
    cost = CostModel.from_profile(profile)
    options = all_options(profile.graph, cost=cost, device=profile.device, num_devices=2)
    machine = Machine(num_devices=2, num_slots=2, memory_bytes=100)
    moved = within_memory("made by hand", waves, options, machine)
    home = {run.parts[0].module: run.devices for wave in moved for run in wave.runs}
    assert home["a"] != home["c"]
    assert home["a"] == home["d"]
    assert [wave.forward_ms for wave in moved] == [wave.forward_ms for wave in waves]
    roomy = Machine(num_devices=2, num_slots=2, memory_bytes=120)
    assert within_memory("made by hand", waves, options, roomy) == waves


def test_runs_of_several_waves_that_are_placed_anew_each_get_devices_of_their_own() -> None:
    """By hand: 11 + 7 and 10 + 8 bytes are the only pairs of two devices; swaps of numbers do not come to it."""
    kept = {"a": 11, "b": 10, "c": 8, "d": 7}
    profile = made(kept, 18, degrees=(1,))
    for order in permutations(kept):
        waves = tuple(
            Wave(runs=(Run(parts=(Part(module=name, forward_ms=1.0),), devices=(0,), quota=2),)) for name in order
        )
        cost, device = CostModel.from_profile(profile), profile.device
        options = all_options(profile.graph, cost=cost, device=device, num_devices=2)
        machine = Machine(num_devices=2, num_slots=device.num_slots, memory_bytes=18)
        found = within_memory("spindle", waves, options, machine)
        on = {run.parts[0].module: run.devices for wave in found for run in wave.runs}
        assert on["a"] == on["d"] != on["b"] == on["c"], order


def test_runs_that_leave_slots_free_still_have_their_devices_to_themselves() -> None:
    """One device has room for both runs of the first wave, and the other then for the module that keeps most."""
    profile = made({"a": 3, "b": 3, "c": 9}, 9, degrees=(1,))
    runs = [Run(parts=(Part(module=name, forward_ms=1.0),), devices=(d,), quota=1) for name, d in (("a", 0), ("b", 1))]
    last = Run(parts=(Part(module="c", forward_ms=1.0),), devices=(0,), quota=2)
    cost, device = CostModel.from_profile(profile), profile.device
    options = all_options(profile.graph, cost=cost, device=device, num_devices=2)
    machine = Machine(num_devices=2, num_slots=device.num_slots, memory_bytes=9)
    with pytest.raises(InfeasibleError, match="what distmm plans does not fit"):
        within_memory("distmm", (Wave(runs=tuple(runs)), Wave(runs=(last,))), options, machine)


def test_a_slice_keeps_its_share() -> None:
    profile = made({"a": 90, "b": 10}, 100, times={"a": linear(8), "b": flat(2)})
    half = Part(module="a", first=0, count=1, total=2)
    rest = Part(module="a", first=1, count=1, total=2)
    waves = (
        Wave(runs=(Run(parts=(half,), devices=(0,), quota=2),)),
        Wave(runs=(Run(parts=(rest, Part(module="b")), devices=(0,), quota=2),)),
    )
    cost = CostModel.from_profile(profile)
    options = all_options(profile.graph, cost=cost, device=profile.device, num_devices=1)
    tight = Machine(num_devices=1, num_slots=2, memory_bytes=100)
    assert within_memory("made by hand", waves, options, tight) == waves
    with pytest.raises(InfeasibleError, match="holds 100 bytes at its fullest and has 99"):
        within_memory("made by hand", waves, options, Machine(num_devices=1, num_slots=2, memory_bytes=99))


@pytest.mark.parametrize("name", PLANNERS)
def test_no_planners_schedule_holds_more_than_there_is(name: str) -> None:
    profile = made({"a": 40, "b": 30, "c": 50, "d": 20}, 100, degrees=(1, 2, 4))
    if name in ("megatron", "distmm-waves"):
        with pytest.raises(InfeasibleError, match="does not fit into the devices' memory"):
            planned(name, profile, num_devices=4)
        return
    schedule = planned(name, profile, num_devices=4)
    assert max(held(schedule, profile)) <= 100


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
