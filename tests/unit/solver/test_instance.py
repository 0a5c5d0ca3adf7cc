"""Instances: what is refused, what pins do, and what the generator makes."""

from __future__ import annotations

from instance_cases import instance, module, option, solve_instance

from bench.solver.generate import Recipe, generate
from mosaic.artifact import parse, to_json
from mosaic.solver.instance import Instance, Pin, TableCost


def test_an_instance_survives_json():
    made = generate(Recipe(shape="multi", num_modules=9, num_devices=4, disturbed=True, tight_memory=True))
    assert parse(Instance, to_json(made), source="here") == made


def test_pins_leave_only_what_they_allow():
    pinned = module("a", option(1, 1), option(1, 2), option(2, 2), pin=Pin(degrees=(1,), quotas=(2, 3)))
    cost = TableCost(instance(pinned))
    assert cost.degrees("a") == (1,)
    assert cost.quotas("a", 1) == (2,)
    answer, _ = solve_instance(instance(pinned, module("b")))
    assert answer.plan.placement("a").quota == 2
    assert answer.plan.placement("a").degree == 1
