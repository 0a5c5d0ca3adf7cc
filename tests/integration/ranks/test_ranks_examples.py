"""The examples run on ranks as they stand, and compute what data-parallel training computes."""

from __future__ import annotations

from pathlib import Path

from ranks.cases import run_ranks
from ranks.example_runs import HAS, RUNS, needs


def test_examples_run_on_ranks_unchanged(tmp_path: Path):
    told = run_ranks("ranks.programs.running.examples:examples", 2, tmp_path)
    there = [" ".join(run) for run in RUNS if all(HAS[package] for package in needs(run))]
    for rank in told:
        assert list(rank) == there
        for name, found in rank.items():
            low = "--precision amp" in name  # 16 bits round by a thousandth or a hundredth
            assert found["losses"] < (1e-2 if low else 1e-5), name
            assert found["parameters"] < (0.1 if low else 1e-2), name  # of what training changed
            assert len(found["placed"]) >= 2, name
