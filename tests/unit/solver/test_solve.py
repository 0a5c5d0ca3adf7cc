"""From profile to plan, and every way in which it can be asked for the impossible."""

from __future__ import annotations

import pytest
from planning_cases import flat, linear, plan_of, profile_of

from mosaic.cost import CostModel
from mosaic.errors import InfeasibleError
from mosaic.profile import ModuleMemory
from mosaic.solver import DeploymentOption
from mosaic.solver.options import all_options
from mosaic.solver.predict import PlacedTimes, build_stages
from mosaic.solver.stage import Machine, StageResult


def test_unequal_encoders_are_planned_side_by_side_before_their_head() -> None:
    times = {"image": linear(6), "text": flat(4), "head": linear(8)}
    profile = profile_of(times, num_slots=4, edges=[("image", "head"), ("text", "head")])
    plan = plan_of(profile)
    assert [stage.names for stage in plan.stages] == [("image", "text"), ("head",)]
    assert plan.placement("image").slots == (0, 1, 2)
    assert plan.placement("text").slots == (3,)
    assert plan.predicted_ms == pytest.approx(2 * (4 + 2))
    assert plan.sequential_ms == pytest.approx(2 * (1.5 + 4 + 2))
    assert plan.predicted_speedup == pytest.approx(7.5 / 6)
    assert plan.profile == profile.fingerprint


def test_modules_that_fit_no_memory_are_named_with_what_they_need_and_what_there_is() -> None:
    memory = [ModuleMemory(module=name, resident_bytes=5000, activation_bytes=0) for name in "ab"]
    profile = profile_of(dict.fromkeys("abc", flat(1)), num_slots=1, memory=memory, memory_bytes=100)
    with pytest.raises(
        InfeasibleError, match="'a' needs 5,000 bytes on each of its devices; made-up has 100"
    ) as caught:
        plan_of(profile)
    assert len(caught.value.reasons) == 2


@pytest.mark.parametrize("method", ["auto", "distmm"])
def test_more_modules_than_the_exact_search_takes_are_planned_by_algorithm_1(method: str) -> None:
    names = [f"m{index}" for index in range(17)]
    profile = profile_of(dict.fromkeys(names, flat(5)), num_slots=1)
    plan = plan_of(profile, num_devices=4, method=method)
    assert plan.predicted_ms == pytest.approx(10 * 5)


def test_a_later_stage_goes_where_the_one_before_ends_first() -> None:
    profile = profile_of({"long": flat(9), "short": flat(2), "next": flat(3)}, num_slots=2, edges=[("short", "next")])
    options = all_options(profile.graph, cost=CostModel.from_profile(profile), device=profile.device, num_devices=1)
    first, then = (
        StageResult(latency_ns=0, choices={name: (options[name][0], (0,)) for name in names})
        for names in (("long", "short"), ("next",))
    )
    machine = Machine(num_devices=1, num_slots=2, memory_bytes=0)
    built = build_stages([first, then], PlacedTimes(CostModel.from_profile(profile)), machine)
    slots = {placed.module: placed.slots for stage in built for placed in stage.placements}
    assert slots == {"long": (0,), "short": (1,), "next": (1,)}


def test_modules_that_have_no_slots_in_common_on_their_devices_have_others_on_each() -> None:
    def option(degree: int) -> DeploymentOption:
        return DeploymentOption(degree=degree, quota=1, forward_ns=1, backward_ns=1)

    pairs = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}  # a triangle on three devices of two slots
    cost = CostModel.from_profile(profile_of(dict.fromkeys(pairs, flat(1)), num_slots=2, degrees=(2,)))
    stage = StageResult(latency_ns=2, choices={name: (option(2), devices) for name, devices in pairs.items()})
    (built,) = build_stages([stage], PlacedTimes(cost), Machine(num_devices=3, num_slots=2, memory_bytes=0))
    cells = [cell for placed in built.placements for cell in placed.cells]
    assert len(set(cells)) == len(cells) == 6
    assert all(slot in (0, 1) for _, slot in cells)
