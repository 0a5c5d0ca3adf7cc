"""Memory held across stages: small cases worked out by hand, what each says, and that it can be switched off."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from instance_cases import solve_instance
from test_instance import instance, module, option

from bench.solver.generate import Recipe, generate
from mosaic.artifact import parse, to_json
from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.graph import Part
from mosaic.plan import Placement, Plan, SearchRecord, Stage
from mosaic.solver import SearchOptions, solve
from mosaic.solver.exact.search import SearchLimits
from mosaic.solver.explain import explain
from mosaic.solver.instances.checker import check_plan
from mosaic.solver.instances.instance import Instance
from mosaic.solver.instances.instance_cost import TableCost
from mosaic.solver.memory import options as held_options
from mosaic.solver.memory.search import search_within_memory
from mosaic.solver.options import all_options
from mosaic.solver.stage import Machine


def kept(degree: int, time_ms: float, memory_bytes: int, *, working: int = 0, quota: int = 4):
    """Keeps all of its memory but ``working``, half of it as activations."""
    stays = memory_bytes - working
    return replace(
        option(degree, quota, time_ms, time_ms, memory_bytes=memory_bytes),
        resident_bytes=stays - stays // 2,
        activation_bytes=stays // 2,
    )


def planned(made: Instance, **search: object) -> Plan:
    return solve(
        made.graph,
        TableCost(made),
        made.device,
        num_devices=made.num_devices,
        method="exact",
        search=SearchOptions(**search),
    )


IN_A_ROW = instance(
    module("a", kept(1, 1, 6)), module("b", kept(1, 1, 6), after=("a",)), module("c", kept(1, 1, 6), after=("b",))
)
"""Three modules that wait for each other, each alone in its stage on one device."""


def test_modules_of_different_stages_get_different_devices_where_one_does_not_hold_both():
    made = replace(IN_A_ROW, num_devices=3, memory_bytes=6)
    plan = planned(made)
    assert sorted(p.devices for p in plan.placements) == [(0,), (1,), (2,)]
    assert plan.search.status == "optimal"
    assert check_plan(made, plan).problems == ()


def test_without_holding_each_stage_is_checked_alone_and_the_checker_objects():
    made = replace(IN_A_ROW, num_devices=3, memory_bytes=6)
    plan = planned(made, hold_memory=False)
    assert [p.devices for p in plan.placements] == [(0,), (0,), (0,)]
    assert "keeps 18 bytes across stages" in check_plan(made, plan).problems[0]


def test_what_all_modules_keep_is_more_than_the_machine_has():
    answer, error = solve_instance(replace(IN_A_ROW, num_devices=2, memory_bytes=8))
    assert answer.status == "infeasible"
    assert isinstance(error, InfeasibleError)
    assert "takes 18 bytes at the least; 2 devices of 8 have 16" in answer.reasons[0]
    assert "activation checkpointing" in answer.reasons[0]


def test_enough_in_all_and_on_no_device_is_infeasible_too():
    answer, _ = solve_instance(replace(IN_A_ROW, num_devices=2, memory_bytes=10))
    assert answer.status == "infeasible"
    assert "no choice of degrees and devices fits" in answer.reasons[0]


def test_work_of_one_stage_at_a_time_is_counted_once():
    """Each works with 6 and keeps 2: 2 + 2 + 6 fit into 10, and 8 + 8 would not."""
    made = instance(
        module("a", kept(1, 1, 8, working=6)), module("b", kept(1, 1, 8, working=6), after=("a",)), memory_bytes=10
    )
    plan = planned(replace(made, num_devices=1))
    assert check_plan(replace(made, num_devices=1), plan).problems == ()
    answer, _ = solve_instance(replace(made, num_devices=1, memory_bytes=9))
    assert answer.status == "infeasible"


def test_a_table_without_the_new_fields_is_read_and_planned_as_before():
    old = generate(Recipe(shape="star", num_modules=5, num_devices=2, tight_memory=True))
    raw = json.loads(to_json(old))
    for one in (each for made in raw["modules"] for each in made["options"]):
        del one["resident_bytes"], one["activation_bytes"]
    assert parse(Instance, json.dumps(raw), source="old.json") == old
    assert planned(old).predicted_ms == planned(old, hold_memory=False).predicted_ms


@pytest.mark.parametrize("fields", [{"resident_bytes": 9, "activation_bytes": 2}, {"resident_bytes": -1}])
def test_parts_of_memory_are_not_negative_and_not_more_than_the_whole(fields):
    with pytest.raises(ValueError, match="bytes"):
        instance(module("a", replace(option(1, 1, 1.0, 1.0, memory_bytes=10), **fields)))


def test_an_undecided_question_is_not_called_infeasible(monkeypatch):
    monkeypatch.setattr(held_options, "ALONE_NODES", 1)
    made = replace(IN_A_ROW, num_devices=2, memory_bytes=10)
    with pytest.raises(UndecidedError, match="not proven that there is none"):
        planned(made)


def test_what_memory_rules_out_is_asked_for_each_degree_and_not_for_each_quota(monkeypatch):
    asked = []
    has_partners = held_options._has_partners
    monkeypatch.setattr(held_options, "_has_partners", lambda *given: asked.append(1) or has_partners(*given))
    made = instance(*(module(name, *(kept(1, 1, 6, quota=quota) for quota in (1, 2, 3, 4))) for name in "abc"))
    assert planned(replace(made, num_devices=3, memory_bytes=6)).search.status == "optimal"
    assert len(asked) == 3


def test_the_checker_names_a_device_that_holds_too_much():
    made = instance(module("a", kept(1, 1, 6)), module("b", kept(1, 1, 6), after=("a",)), memory_bytes=10)
    stages = tuple(
        Stage(placements=(Placement(part=Part(module=name), slots=(0, 1, 2, 3), forward_ms=1.0, backward_ms=1.0),))
        for name in "ab"
    )
    plan = Plan(device=made.device, num_devices=2, stages=stages, graph="any", search=SearchRecord(method="manual"))
    assert check_plan(made, plan).problems == ("device 0 keeps 12 bytes across stages and works with 0; it has 10",)


def test_the_next_best_plan_is_within_memory_too():
    beside = (kept(1, 4, 3, quota=2),)
    made = instance(module("a", *beside), module("b", *beside), module("c", *beside), memory_bytes=5)
    made = replace(made, num_devices=3)
    plan = planned(made)
    assert plan.predicted_ms == pytest.approx(8)
    found = explain(plan, made.graph, TableCost(made)).next_best
    assert found.predicted_ms == pytest.approx(16)


def test_a_search_starts_from_the_plans_of_others_where_devices_do_not_hold_its_relaxed_plan() -> None:
    recipe = Recipe(shape="align", num_modules=7, num_devices=8, held_memory=True, tight_memory=True, seed=1)
    made = generate(recipe)
    cost = TableCost(made)
    options = all_options(made.graph, cost=cost, device=made.device, num_devices=8)
    machine = Machine(num_devices=8, num_slots=made.num_slots, memory_bytes=made.memory_bytes)
    better = search_within_memory(made.graph, options, cost=cost, machine=machine, limits=SearchLimits(effort=2))
    asked: list[float] = []
    started = search_within_memory(
        made.graph,
        options,
        cost=cost,
        machine=machine,
        limits=SearchLimits(effort=0.5),
        incumbents=lambda seconds: [better.stages] if not asked.append(seconds) else [],
    )
    assert len(asked) == 1
    assert started.cost_ms <= better.cost_ms + 1e-9
