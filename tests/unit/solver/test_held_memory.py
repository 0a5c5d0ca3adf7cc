"""Memory held across stages: small cases worked out by hand, what each says, and that it can be switched off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from instance_cases import instance, module, option

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


def test_an_undecided_question_is_not_called_infeasible(monkeypatch):
    monkeypatch.setattr(held_memory, "IN_TURN_EFFORT", 0.0)
    made = replace(IN_A_ROW, num_devices=2, memory_bytes=10)
    with pytest.raises(UndecidedError, match="not proven that there is none"):
        planned(made)
