"""The examples run on ranks as they stand, and compute what data-parallel training computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks.cases import run_ranks
from ranks.example_runs import HAS, RUNS, needs


def overlap_in_part(members: list[Any]) -> bool:
    """Whether any two sets have something in common, and each something of its own."""
    sets = [set(ranks) for ranks in members]
    return any(a & b and a - b and b - a for a in sets for b in sets)


@pytest.mark.parametrize("size", [2, 3])
def test_examples_run_on_ranks_unchanged(tmp_path: Path, size: int):
    told = run_ranks("ranks.programs.running.examples:examples", size, tmp_path)
    there = [" ".join(run) for run in RUNS[size] if all(HAS[package] for package in needs(run))]
    for rank in told:
        assert list(rank) == there
        for name, found in rank.items():
            low = "--precision amp" in name  # 16 bits round by a thousandth or a hundredth
            assert found["losses"] < (1e-2 if low else 1e-5), name
            assert found["parameters"] < (0.1 if low else 1e-2), name  # of what training changed
            assert len(found["placed"]) >= 2, name
    if size == 3:
        assert all(overlap_in_part(found["members"]) for found in told[0].values())
