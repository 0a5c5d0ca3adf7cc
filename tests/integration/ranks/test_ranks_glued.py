"""Glued models on two ranks train as on one: in pipelines, with sequences shared out, with a modality missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.nursery import run_program


@pytest.mark.parametrize("name", ["in_pipelines", "of_one_sequence", "lacking_a_modality"])
def test_glued_models_train_on_two_ranks_as_on_one(tmp_path: Path, name: str):
    ended = run_program(f"ranks.programs.glued:{name}", 2, tmp_path / "ranks", seconds=120.0)
    assert [(one.code, one.said.endswith("equal\n")) for one in ended] == [(0, True)] * 2, ended
