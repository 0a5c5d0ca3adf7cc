"""A quota for each phase: what it would be worth, and that no plan can have one."""

from __future__ import annotations

import json

import pytest
from bench.solver.generate import SHAPES, Recipe, generate
from test_instance import instance, module, option

from mosaic.artifact import parse, to_json
from mosaic.errors import InvalidFileError
from mosaic.plan import Plan
from mosaic.solver import solve
from mosaic.solver.instances.instance import Disturbance
from mosaic.solver.instances.instance_cost import TableCost
from mosaic.solver.phase_quotas import split_by_phase


def crossed(**fields: object):
    """Forward of a wants slots, backward of b wants slots; one quota serves both badly."""
    first = [option(1, q, 12.0 / q, 4.0) for q in (1, 2, 3)]
    second = [option(1, q, 4.0, 12.0 / q) for q in (1, 2, 3)]
    return instance(module("a", *first), module("b", *second), num_devices=1, **fields)


def planned(made) -> Plan:
    return solve(made.graph, TableCost(made), made.device, num_devices=made.num_devices, method="exact")


def test_each_phase_gets_the_quotas_that_it_wants():
    made = crossed()
    plan = planned(made)
    found = split_by_phase(plan, TableCost(made))
    assert plan.predicted_ms == pytest.approx(12)
    assert found.predicted_ms == pytest.approx(8)
    assert found.stages[0].forward == {"a": 3, "b": 1}
    assert found.stages[0].backward == {"a": 1, "b": 3}


def test_quotas_that_disturb_more_than_they_gain_are_not_taken():
    made = crossed(disturbances=(Disturbance(module="b", beside="a", forward=8.0),))
    plan = planned(made)
    assert split_by_phase(plan, TableCost(made)).predicted_ms <= plan.predicted_ms * (1 + 1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("disturbed", [False, True])
def test_it_is_never_slower_than_the_plan_and_never_gives_out_more_slots_than_there_are(shape, disturbed):
    made = generate(Recipe(shape=shape, num_modules=6, num_devices=4, disturbed=disturbed))
    plan = planned(made)
    found = split_by_phase(plan, TableCost(made))
    assert found.predicted_ms <= plan.predicted_ms * (1 + 1e-9)
    for stage, split in zip(plan.stages, found.stages, strict=True):
        for quotas in (split.forward, split.backward):
            for device in range(plan.num_devices):
                assert sum(quotas[p.module] for p in stage.placements if device in p.devices) <= made.num_slots


def test_a_plan_file_with_a_second_quota_is_refused_and_not_run_without_it():
    raw = json.loads(to_json(planned(crossed())))
    raw["stages"][0]["placements"][0]["backward_slots"] = [0, 1]
    with pytest.raises(InvalidFileError, match="backward_slots"):
        parse(Plan, json.dumps(raw), source="plan.json")
