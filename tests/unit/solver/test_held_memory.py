"""Memory held across stages: small cases worked out by hand, what each says, and that it can be switched off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from instance_cases import instance, module, option, solve_instance
from plan_checker import check_plan

from mosaic.errors import UndecidedError
from mosaic.plan import Plan
from mosaic.solver import SearchOptions, held_memory, solve
from mosaic.solver.instance import Instance, TableCost


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


def test_work_of_one_stage_at_a_time_is_counted_once():
    """Each works with 6 and keeps 2: 2 + 2 + 6 fit into 10, and 8 + 8 would not."""
    made = instance(
        module("a", kept(1, 1, 8, working=6)), module("b", kept(1, 1, 8, working=6), after=("a",)), memory_bytes=10
    )
    plan = planned(replace(made, num_devices=1))
    assert check_plan(replace(made, num_devices=1), plan).problems == ()
    answer, _ = solve_instance(replace(made, num_devices=1, memory_bytes=9))
    assert answer.status == "infeasible"


def test_an_undecided_question_is_not_called_infeasible(monkeypatch):
    monkeypatch.setattr(held_memory, "IN_TURN_EFFORT", 0.0)
    made = replace(IN_A_ROW, num_devices=2, memory_bytes=10)
    with pytest.raises(UndecidedError, match="not proven that there is none"):
        planned(made)
