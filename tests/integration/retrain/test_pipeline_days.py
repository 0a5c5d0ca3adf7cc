"""A day whose model is divided over two ranks by its layers: judged, verified, and the same bits after kills."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import run_script


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of ``retraining_pipeline.py``."""
    said, lines = run_script("retraining_pipeline.py", str(tmp_path_factory.mktemp("pipeline")))
    return {"said": said, **{name: value for line in lines for name, value in line.items()}}


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
