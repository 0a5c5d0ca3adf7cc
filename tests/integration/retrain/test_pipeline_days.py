"""A day whose model is divided over two ranks by its layers: judged, verified, and the same bits after kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
SCRIPT = TESTS / "cases" / "retraining" / "retraining_pipeline.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of ``retraining_pipeline.py``, from a process of its own, which makes forks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("pipeline"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {"said": done.stdout, **{name: value for line in lines for name, value in json.loads(line).items()}}


def test_a_day_killed_while_its_ranks_train_ends_with_the_bits_of_an_undisturbed_one(told: dict[str, Any]):
    assert told["launcher_killed"]["nobody_left"]
    assert (told["quiet"], told["killed"]) == (0, 0)
    assert told["differs"] == []
    assert told["same_bits"]
    assert told["starts"] == ["launcher killed", "killed (SIGKILL)", "done"]
    assert (told["outcome"], told["steps"]) == ("promoted", 40)


def test_steps_of_a_divided_day_are_repeated_with_the_same_bits(told: dict[str, Any]):
    assert told["verify"] == {"outcome": None, "reason": ""}
    assert "have the same losses to the last bit, and the parameters after step 40 too" in told["said"]
