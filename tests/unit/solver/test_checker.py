"""The checker: what it says of right and of wrong plans, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from instance_cases import instance, module, option
from plan_checker import check_plan

from mosaic.graph import Part
from mosaic.plan import Grid, Placement, Plan, SearchRecord, Stage
from mosaic.solver.instance import Disturbance, Pin

OPTIONS = (
    option(1, 1, 4.0, 8.0, memory_bytes=10),
    option(1, 2, 2.0, 4.0, memory_bytes=10),
    option(2, 2, 1.0, 3.0, memory_bytes=6),
)
A, B, C = module("a", *OPTIONS), module("b", *OPTIONS), module("c", *OPTIONS, after=("a",))
MADE = instance(A, B, C, memory_bytes=20, disturbances=(Disturbance(module="a", beside="b", forward=0.5),))


def place(name: str, forward_ms: float, backward_ms: float, *slots: int, devices: tuple[int, ...] = (0,)) -> Placement:
    return Placement(
        part=Part(module=name), slots=slots, grid=Grid(ranks=devices), forward_ms=forward_ms, backward_ms=backward_ms
    )


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


A_ALONE, B_ALONE = place("a", 2.0, 4.0, 0, 1), place("b", 2.0, 4.0, 0, 1)
RIGHT = ((A_BESIDE_B, B_BESIDE_A), (C_ALONE,))


@pytest.mark.parametrize(
    ("stages", "machine", "says"),
    [
        (((A_ALONE, B_BESIDE_A), (C_ALONE,)), {}, "takes 2.5 ms"),
        (((A_ALONE,), (C_ALONE,)), {}, "'b' is not placed"),
        (((A_ALONE, place("c", 2.0, 4.0, 2, 3)), (B_ALONE,)), {}, "'c' is in stage 0 and waits for 'a'"),
        (((place("c", 2.0, 4.0, 2, 3),), (A_ALONE,), (B_ALONE,)), {}, "'c' is in stage 0 and waits for 'a'"),
        (RIGHT, {"num_devices": 3}, "the plan is for 3 devices of 4 slots"),
        (
            ((A_BESIDE_B, place("b", 2.0, 4.0, 4, 5)), (C_ALONE,)),
            {"num_slots": 6},
            "'b' holds slot 4 of device 0, which is not there",
        ),
        (RIGHT, {"of": replace(MADE, memory_bytes=15)}, "stage 0: device 0 needs 20 bytes and has 15"),
        (
            RIGHT,
            {"of": replace(MADE, modules=(replace(A, pin=Pin(quotas=(1,))), B, C))},
            "'a' has degree 1 and quota 2, which its pin forbids",
        ),
    ],
)
def test_what_is_wrong_is_named(stages, machine, says):
    assert says in problems(*stages, **machine)
