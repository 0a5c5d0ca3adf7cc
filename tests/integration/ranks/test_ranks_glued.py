"""Glued models on ranks train as on one: with sequences shared out, with a modality missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.nursery import run_program


@pytest.mark.parametrize(("name", "size"), [("over_sequences", 4), ("lacking_a_modality", 2)])
def test_glued_models_train_on_ranks_as_on_one(tmp_path: Path, name: str, size: int):
    ended = run_program(f"ranks.programs.glued:{name}", size, tmp_path / "ranks", seconds=120.0)
    assert [(one.code, one.said.endswith("equal\n")) for one in ended] == [(0, True)] * size, ended
