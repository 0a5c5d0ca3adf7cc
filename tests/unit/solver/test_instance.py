"""Instances: what is refused, what pins do, and what the generator makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from instance_cases import instance, module, option, solve_instance

from bench.solver.generate import Recipe, generate
from mosaic.artifact import parse, to_json
from mosaic.errors import InfeasibleError, InvalidGraphError
from mosaic.solver.instance import Disturbance, Instance, InstanceModule, Pin, TableCost


def test_an_instance_survives_json():
    made = generate(Recipe(shape="multi", num_modules=9, num_devices=4, disturbed=True, tight_memory=True))
    assert parse(Instance, to_json(made), source="here") == made


@pytest.mark.parametrize(
    ("modules", "fields", "message"),
    [
        *(([module("a")], {name: 0}, "at least one device") for name in ("num_devices", "num_slots")),
        ([module("a")], {"memory_bytes": -1}, "no negative memory"),
        ([], {}, "at least one device, slot and module"),
        ([module("a"), module("a")], {}, "twice"),
        ([InstanceModule(name="a", options=())], {}, "'a' has no options"),
        *(
            ([module("a", bad)], {}, "module 'a'")
            for bad in (option(degree=0), option(quota=0), option(memory_bytes=-1))
        ),
        ([module("a", option(), option(forward_ms=3.0))], {}, "list each option once"),
        ([module("a", option(memory_bytes=1), option(quota=2, memory_bytes=2))], {}, "give one number"),
        (
            [module("a", replace(option(memory_bytes=10), resident_bytes=9, activation_bytes=2))],
            {},
            "at least their sum",
        ),
        *(
            ([module("a"), module("b")], {"disturbances": (bad,)}, "disturbance")
            for bad in (
                Disturbance(module="a", beside="a"),
                Disturbance(module="a", beside="ghost"),
                Disturbance(module="a", beside="b", forward=-0.1),
                Disturbance(module="a", beside="b", backward=float("inf")),
            )
        ),
    ],
)
def test_an_instance_that_makes_no_sense_is_refused_with_the_rule(modules, fields, message):
    with pytest.raises(ValueError, match=message):
        instance(*modules, **fields)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ([module("a", after=("b",)), module("b", after=("a",))], r"a.*b|b.*a"),
        ([module("a", after=("ghost",))], "ghost"),
    ],
)
def test_a_cycle_and_an_unknown_module_are_refused_by_name(modules, named):
    with pytest.raises(InvalidGraphError, match=named):
        instance(*modules)


def test_pins_leave_only_what_they_allow():
    pinned = module("a", option(1, 1), option(1, 2), option(2, 2), pin=Pin(degrees=(1,), quotas=(2, 3)))
    cost = TableCost(instance(pinned))
    assert cost.degrees("a") == (1,)
    assert cost.quotas("a", 1) == (2,)
    answer, _ = solve_instance(instance(pinned, module("b")))
    assert answer.plan.placement("a").quota == 2
    assert answer.plan.placement("a").degree == 1


def test_pins_that_contradict_each_other_name_the_module_and_both():
    pinned = module("a", option(1, 1), option(2, 2), pin=Pin(degrees=(1,), quotas=(2,)))
    answer, error = solve_instance(instance(pinned, module("b")))
    assert answer.status == "infeasible"
    assert isinstance(error, InfeasibleError)
    assert answer.reasons == error.reasons
    assert "'a' is pinned to degrees [1] and quotas [2]" in answer.reasons[0]
