"""A day on another number of ranks at each start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mosaic.retrain.day as launcher
from mosaic.retrain.recipe import read_recipe

TESTS = Path(__file__).parents[2]
SCRIPT = TESTS / "cases" / "retraining" / "retraining_ranks.py"
DAY = "2026-11-20"
FAULTS = "    import sys\n    sys.modules['node_faults'].before_loss()\n"
"""Of this process; a process of its own knows nothing of them."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of ``retraining_ranks.py``, from a process of its own, which makes forks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("ranks"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: value for line in lines for name, value in json.loads(line).items()}


def test_the_report_names_the_step_from_which_other_ranks_give_other_bits(told: dict[str, Any]):
    found = told["other"]
    assert (found["stopped"], found["ended"], found["step"]) == (75, 0, 40)
    assert found["restarts"] == [["SIGTERM", found["stopped_at"]]]
    assert 5 <= (found["differs_from_step"] or 0) < 40
    assert "there were 2 ranks and are 1" in found["differs_because"]


def test_check_names_what_cannot_be_divided_over_ranks(make_node: Callable[..., Any]):
    node = make_node(DAY, budget={"ranks": 2})
    node.change(FAULTS, "")
    folder = node.folder
    ended = launcher.Workers(folder, folder.day("check"), read_recipe(folder.recipe)).aside("check")
    assert ended.outcome == "failed"
    assert "left.1 is a BatchNorm1d" in ended.reason
    assert "set ranks = 1" in ended.reason
