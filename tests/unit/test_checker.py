"""The checker: what it says of right and of wrong plans, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_instance import instance, module, option

from mosaic.plan import Placement, Plan, SearchRecord, Stage
from mosaic.solver.instances.checker import check_plan
from mosaic.solver.instances.instance import Disturbance, Pin

OPTIONS = (
    option(1, 1, 4.0, 8.0, memory_bytes=10),
    option(1, 2, 2.0, 4.0, memory_bytes=10),
    option(2, 2, 1.0, 3.0, memory_bytes=6),
)
A, B, C = module("a", *OPTIONS), module("b", *OPTIONS), module("c", *OPTIONS, after=("a",))
MADE = instance(A, B, C, memory_bytes=20, disturbances=(Disturbance(module="a", beside="b", forward=0.5),))


def place(name: str, forward_ms: float, backward_ms: float, *slots: int, devices: tuple[int, ...] = (0,)) -> Placement:
    return Placement(module=name, slots=slots, devices=devices, forward_ms=forward_ms, backward_ms=backward_ms)


A_BESIDE_B = place("a", 2.0 * 1.25, 4.0, 0, 1)
B_BESIDE_A = place("b", 2.0, 4.0, 2, 3)
C_ALONE = place("c", 1.0, 3.0, 0, 1, devices=(0, 1))


def plan_of(*stages: tuple[Placement, ...], num_devices: int = 2, num_slots: int = 4) -> Plan:
    return Plan(
        device=replace(MADE.device, num_slots=num_slots),
        num_devices=num_devices,
        stages=tuple(Stage(placements=stage) for stage in stages),
        graph="any",
        search=SearchRecord(method="manual"),
    )


def problems(*stages: tuple[Placement, ...], of=MADE, **machine: int) -> str:
    return "\n".join(check_plan(of, plan_of(*stages, **machine)).problems)


def test_a_right_plan_has_no_problem_and_its_time_worked_out_by_hand():
    verdict = check_plan(MADE, plan_of((A_BESIDE_B, B_BESIDE_A), (C_ALONE,)))
    assert verdict.problems == ()
    assert verdict.is_valid
    assert verdict.objective_ms == pytest.approx(2.5 + 4.0 + 1.0 + 3.0)


def test_a_neighbour_on_another_device_disturbs_nobody():
    apart = place("b", 2.0, 4.0, 0, 1, devices=(1,))
    assert problems((place("a", 2.0, 4.0, 0, 1), apart), (C_ALONE,)) == ""


def test_the_worst_device_of_a_module_counts():
    wide = place("a", 1.0 * 1.25, 3.0, 0, 1, devices=(0, 1))
    beside = place("b", 2.0, 4.0, 2, 3, devices=(1,))
    assert problems((wide, beside), (C_ALONE,)) == ""


def test_a_claim_of_another_time_is_a_problem():
    assert "takes 2.5 ms" in problems((place("a", 2.0, 4.0, 0, 1), B_BESIDE_A), (C_ALONE,))


def test_a_module_that_is_missing_is_named():
    assert problems((place("a", 2.0, 4.0, 0, 1),), (C_ALONE,)) == "'b' is not placed"


def test_a_module_that_is_not_in_the_instance_is_named():
    verdict = check_plan(MADE, plan_of((A_BESIDE_B, B_BESIDE_A), (C_ALONE,), (place("ghost", 0.0, 0.0, 0),)))
    assert verdict.problems == ("'ghost' is placed, and not in the instance",)
    assert verdict.objective_ms is None


@pytest.mark.parametrize("together", [True, False])
def test_a_module_in_or_before_the_stage_of_what_it_waits_for_is_named(together):
    first = place("a", 2.0, 4.0, 0, 1)
    b = place("b", 2.0, 4.0, 0, 1)
    c = place("c", 2.0, 4.0, 2, 3)
    assert "'c' is in stage 0 and waits for 'a'" in (
        problems((first, c), (b,)) if together else problems((c,), (first,), (b,))
    )


def test_a_shape_that_the_table_lacks_is_named():
    verdict = check_plan(MADE, plan_of((place("a", 1.0, 1.0, 0, 1, 2),), (place("b", 2.0, 4.0, 0, 1),), (C_ALONE,)))
    assert "'a' has degree 1 and quota 3, which its table lacks" in verdict.problems[0]
    assert verdict.objective_ms is None


def test_a_shape_that_a_pin_forbids_is_named():
    pinned = replace(MADE, modules=(replace(A, pin=Pin(quotas=(1,))), B, C))
    assert "'a' has degree 1 and quota 2, which its pin forbids" in problems(
        (A_BESIDE_B, B_BESIDE_A), (C_ALONE,), of=pinned
    )


def test_memory_of_a_stage_is_added_up_by_device():
    little = replace(MADE, memory_bytes=15)
    assert problems((A_BESIDE_B, B_BESIDE_A), (C_ALONE,), of=little) == "stage 0: device 0 needs 20 bytes and has 15"


def test_a_plan_for_another_machine_is_refused():
    assert "the plan is for 3 devices of 4 slots" in problems((A_BESIDE_B, B_BESIDE_A), (C_ALONE,), num_devices=3)


def test_a_slot_that_is_not_there_is_named():
    far = place("b", 2.0, 4.0, 4, 5)
    found = problems((place("a", 2.0 * 1.25, 4.0, 0, 1), far), (C_ALONE,), num_slots=6)
    assert "'b' holds slot 4 of device 0, which is not there" in found


def test_slots_that_two_modules_hold_are_named_even_in_a_plan_that_went_unchecked():
    unchecked = plan_of((A_BESIDE_B, B_BESIDE_A), (C_ALONE,))
    object.__setattr__(unchecked.stages[0], "placements", (A_BESIDE_B, place("b", 2.0, 4.0, 1, 2)))
    assert "'a' and 'b' both hold slot 1 of device 0" in "\n".join(check_plan(MADE, unchecked).problems)
