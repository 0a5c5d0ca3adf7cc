"""Layers that ranks of a pipeline share: the plain loop's gradients, checkpoints of whole tensors, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.nursery import run_program

BOUND_S = 120.0
PROGRAMS = "ranks.programs.pipeline.shared_layers"


@pytest.mark.parametrize(("name", "size"), [("of_two", 2), ("two_by_two", 4), ("refused", 2)])
def test_layers_that_ranks_share_train_as_the_plain_loop_does(tmp_path: Path, name: str, size: int):
    ended = run_program(f"{PROGRAMS}:{name}", size, tmp_path / name, seconds=BOUND_S)
    assert [(one.code, one.said) for one in ended] == [(0, "equal\n")] * size


def test_a_rank_that_waits_for_a_part_of_a_sum_hears_why_it_does_not_come(tmp_path: Path):
    first, second = run_program(f"{PROGRAMS}:an_error_of_one", 2, tmp_path / "ranks", seconds=BOUND_S)
    assert first.code == second.code == 1
    assert "ValueError: no such caption" in second.said
    assert "RankFailedError: rank 1 failed in " in first.said
