"""Days of several ranks: other ranks at each start, kills of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import FAULTS, FIRST, run_script

import mosaic.retrain.day as launcher
from mosaic.retrain.recipe import read_recipe


def test_the_day_names_the_step_from_which_other_ranks_give_other_bits(tmp_path: Path):
    (day,) = run_script("retraining_ranks.py", "stopped", str(tmp_path))[1]
    assert (day["codes"], day["steps"]) == ([75, 0], 40)
    (first, begin), (last, step) = day["starts"]
    assert (first, begin, last) == ("SIGTERM", 0, "done")
    assert step >= 5
    assert day["differs"][0] == step
    assert "num_ranks was 2 and is 1" in day["differs"][1]


def test_a_day_of_two_ranks_that_are_killed_ends_with_the_bits_of_an_undisturbed_day(tmp_path: Path):
    printed, (day,) = run_script("retraining_ranks.py", "killed", str(tmp_path))
    assert (day["left"], day["codes"]) == ([], [0, 0])
    assert (day["differs"], day["from_step"], day["outcome"]) == ([], None, "promoted")
    assert day["starts"] == ["launcher killed", "killed (SIGKILL)", "done"]
    assert day["verified"] == [None, ""]
    assert "have the same losses to the last bit, and the parameters after step 40 too" in printed


def test_check_names_a_module_that_cannot_be_divided_over_ranks(make_node: Callable[..., Any]):
    node = make_node(FIRST, budget={"ranks": 2})
    node.change(FAULTS, "")  # of this process; a process of its own knows nothing of them
    folder = node.folder
    ended = launcher.Workers(folder, folder.day("check"), read_recipe(folder.recipe)).inspect("check")
    assert ended.outcome == "failed"
    assert "left.1 is a BatchNorm1d" in ended.reason
    assert "set ranks = 1" in ended.reason
