"""Memory held across stages: a question that the search leaves open is an error of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from instance_cases import instance, module, option, solve_instance

from mosaic.errors import UndecidedError
from mosaic.solver import held_memory


def test_an_undecided_question_is_not_called_infeasible(monkeypatch: pytest.MonkeyPatch):
    holds = replace(option(1, 4, 1, 1, memory_bytes=6), resident_bytes=3, activation_bytes=3)
    in_a_row = instance(module("a", holds), module("b", holds, after=("a",)), module("c", holds, after=("b",)))
    monkeypatch.setattr(held_memory, "IN_TURN_EFFORT", 0.0)
    with pytest.raises(UndecidedError, match="not proven that there is none"):
        solve_instance(replace(in_a_row, num_devices=2, memory_bytes=10))
