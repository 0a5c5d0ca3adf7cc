"""A glued model on ranks that share its sequences trains as on one."""

from __future__ import annotations

from pathlib import Path

from ranks.nursery import run_program


def test_a_glued_model_trains_on_ranks_as_on_one(tmp_path: Path):
    ended = run_program("ranks.programs.glued:over_sequences", 4, tmp_path / "ranks", seconds=120.0)
    assert [(rank.code, rank.said.endswith("equal\n")) for rank in ended] == [(0, True)] * 4, ended
