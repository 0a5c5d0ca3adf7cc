"""One table of methods: a method that is added to it is offered everywhere."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from planning_cases import flat, linear, plan_of, profile_of
from rich.console import Console

from mosaic.cost import CostModel
from mosaic.plan import SearchRecord
from mosaic.report.table import comparison_table
from mosaic.solver import METHODS
from mosaic.solver.compare import compare
from mosaic.solver.methods import Method, compared_methods, describe_methods, method_of, plan_in_turn
from mosaic.solver.runnable import check_method, plan_to_run
from mosaic.solver.task import Answer, Task

PROFILE = profile_of({"a": linear(8), "b": flat(3)}, num_slots=2, degrees=(1, 2), edges=["ab"])


def mine(task: Task) -> Answer:
    """A solver that a user writes."""
    return replace(plan_in_turn(task), record=SearchRecord(method=task.method))


def test_a_method_that_is_added_is_solved_run_compared_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mine", Method(name="mine", description="a solver of one's own", plan=mine))
    assert plan_of(PROFILE, "mine").search.method == "mine"
    cost = CostModel.from_profile(PROFILE)
    assert plan_to_run("mine", PROFILE.graph, cost, PROFILE.device, num_devices=2).search.method == "mine"
    check_method("mine")
    rows = compare(PROFILE.graph, cost, PROFILE.device, num_devices=2)
    assert tuple(row.method for row in rows if row.plan is not None) == compared_methods()
    assert compared_methods()[-1] == "mine"
    assert "mine (a solver of one's own)" in describe_methods()


def test_a_name_that_is_not_in_the_table_is_refused_with_all_that_are() -> None:
    with pytest.raises(ValueError, match="unknown method 'mine'; choose one of: auto, sequential, data-parallel"):
        plan_of(PROFILE, "mine")
    assert all(method_of(name).name == name for name in METHODS)
    assert [name for name, method in METHODS.items() if method.gives_bound] == ["auto", "exact"]


def test_a_method_that_cannot_is_listed_with_its_reason_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(task: Task) -> Answer:
        raise ValueError(f"{len(task.options)} modules are too many")

    monkeypatch.setitem(METHODS, "mine", Method(name="mine", description="refuses", plan=refuse))
    cost = CostModel.from_profile(PROFILE)
    rows = compare(PROFILE.graph, cost, PROFILE.device, methods=("megatron", "mine"))
    assert [row.plan is not None for row in rows] == [True, False]
    console = Console(file=StringIO(), width=200)
    console.print(comparison_table(rows))
    assert "2 modules are too many" in console.file.getvalue()  # type: ignore[attr-defined]
