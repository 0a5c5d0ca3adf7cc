"""The engine of several ranks: what is sent, what overlaps, and how failures come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks.cases import run_ranks


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("ranks.programs.calls.engine:observed", 2, tmp_path_factory.mktemp("ranks"))


def test_a_module_gets_its_rows_and_runs_while_another_computes_forward_and_backward(observed: list[dict[str, Any]]):
    assert [found["met"] for found in observed] == [True, True]


def test_modules_on_all_ranks_agree_on_nothing_and_run_rows_and_arguments_of_each_rank_s_own(
    observed: list[dict[str, Any]],
):
    assert [found["own rows"] for found in observed] == [(True, 7), (True, 7)], (
        "of the third module: facts, rows, results and their gradients; then facts with rows, results, gradients"
    )


def test_a_failure_on_a_lane_comes_out_of_the_loop_and_nothing_is_sent_after_it(tmp_path: Path):
    first, second = run_ranks("ranks.programs.calls.engine:failing", 2, tmp_path)
    assert first.count("ArithmeticError: no such gradient") == 2
    assert "raised in the backward of module 'left'" in first
    assert "this rank is out of step with the others" in first
    assert second.startswith(("RankFailedError: rank 0", "RuntimeError"))
