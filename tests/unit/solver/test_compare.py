"""All planners side by side: what is listed, what is a reason, how it is printed."""

from __future__ import annotations

from io import StringIO

import pytest
from planning_cases import flat, linear, profile_of

from mosaic.cost import CostModel
from mosaic.profile import Profile
from mosaic.report.table import comparison_table
from mosaic.solver.compare import Comparison, compare
from mosaic.solver.methods import METHODS, Method, compared_methods
from mosaic.solver.task import Answer, Task


def small() -> Profile:
    times = {"a": linear(8), "b": flat(3), "head": linear(4)}
    return profile_of(times, num_slots=2, degrees=(1, 2), edges=[("a", "head"), ("b", "head")])


def compared(profile: Profile, num_devices: int = 2, **more: object) -> tuple[Comparison, ...]:
    return compare(profile.graph, CostModel.from_profile(profile), profile.device, num_devices=num_devices, **more)


def printed(rows: tuple[Comparison, ...], width: int = 100) -> str:
    from rich.console import Console

    out = StringIO()
    Console(file=out, width=width).print(comparison_table(rows))
    return out.getvalue()


def test_every_planner_and_solver_is_listed_in_order() -> None:
    rows = compared(small())
    assert tuple(row.method for row in rows) == compared_methods()
    assert compared_methods()[:2] == ("sequential", "megatron")
    assert all(row.plan is not None and row.predicted_ms and not row.reason for row in rows)
    assert all(row.seconds > 0 for row in rows)


def test_a_method_that_cannot_is_listed_with_its_reason_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(task: Task) -> Answer:
        raise ValueError(f"{len(task.options)} modules are too many")

    monkeypatch.setitem(METHODS, "mine", Method(name="mine", description="refuses", plan=refuse))
    profile = profile_of(dict.fromkeys("abcdefg", flat(1)), num_slots=1)
    rows = compared(profile, methods=("megatron", "mine"))
    assert rows[0].ratio == 1.0
    assert rows[1].plan is None
    assert rows[1].status == "refused"
    assert rows[1].predicted_ms is rows[1].ratio is None
    assert rows[1].reason in printed(rows, width=200)
