"""A day on another number of ranks at each start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import FAULTS, FIRST, run_script

import mosaic.retrain.day as launcher
from mosaic.retrain.recipe import read_recipe


def test_the_report_names_the_step_from_which_other_ranks_give_other_bits(tmp_path: Path):
    (found,) = run_script("retraining_ranks.py", str(tmp_path))[1]
    assert (found["stopped"], found["ended"], found["step"]) == (75, 0, 40)
    assert found["starts"] == [["SIGTERM", 0], ["done", found["stopped_at"]]]
    assert 5 <= (found["differs_from_step"] or 0) < 40
    assert "num_ranks was 2 and is 1" in found["differs_because"]


def test_check_names_what_cannot_be_divided_over_ranks(make_node: Callable[..., Any]):
    node = make_node(FIRST, budget={"ranks": 2})
    node.change(FAULTS, "")  # of this process; a process of its own knows nothing of them
    folder = node.folder
    ended = launcher.Workers(folder, folder.day("check"), read_recipe(folder.recipe)).aside("check")
    assert ended.outcome == "failed"
    assert "left.1 is a BatchNorm1d" in ended.reason
    assert "set ranks = 1" in ended.reason
