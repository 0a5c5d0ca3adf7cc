"""A pipeline that starts again runs as it did; a user's loss and score around a model run in pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.nursery import run_program

BOUND_S = 120.0
PROGRAMS = "ranks.programs.pipeline.kept"


@pytest.mark.parametrize("name", ["again", "around"])
def test_what_was_kept_runs_as_before_and_scores_are_the_plain_models(tmp_path: Path, name: str):
    ended = run_program(f"{PROGRAMS}:{name}", 2, tmp_path / name, seconds=BOUND_S)
    assert [(one.code, one.said) for one in ended] == [(0, "equal\n")] * 2


def test_a_loss_that_is_no_scalar_is_named_on_all_ranks(tmp_path: Path):
    for one in run_program(f"{PROGRAMS}:by_rows", 2, tmp_path / "ranks", seconds=BOUND_S):
        assert one.code == 1
        assert "loss returned a Tensor of shape (3,); return a scalar, the mean over the rows" in one.said
