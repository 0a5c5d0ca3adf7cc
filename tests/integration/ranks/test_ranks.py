"""Rank 0 plans for all ranks."""

from __future__ import annotations

from pathlib import Path

from ranks.cases import run_ranks


def test_rank_0_profiles_and_solves_for_all(tmp_path: Path):
    first, second = run_ranks("ranks.training:solved", 2, tmp_path)
    assert first[0] == second[0]
    assert first[1] != second[1]
