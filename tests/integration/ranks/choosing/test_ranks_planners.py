"""The plans of every planner run on the same engine, and train what data-parallel training trains."""

from __future__ import annotations

from pathlib import Path

from ranks.cases import run_ranks
from ranks.programs.choosing.planners import Chains


def test_plans_are_measured_in_turn_with_data_parallel_training(tmp_path: Path):
    first, second = run_ranks("ranks.programs.choosing.planners:compared", 2, tmp_path)
    assert first == second
    _, whole, brute = first
    assert [one[0] for one in first] == ["sequential", "data-parallel", "exact"]
    assert whole[2:4] == (4, 2)
    parameters = sum(p.nbytes for p in Chains().parameters())
    # Parameters, gradients, and AdamW's two moments; its counts of steps are a few bytes more.
    assert all(4 * parameters <= held <= 4.1 * parameters + 200 for held in (*whole[4], *whole[5]))
    assert whole[6] == 2 * parameters  # everything runs on both ranks
    assert brute[2] > 0 or brute[1]
