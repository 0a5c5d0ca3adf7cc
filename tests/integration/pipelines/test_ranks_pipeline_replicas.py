"""Replicas of a pipeline on ranks that are processes: the plain loop's gradients, and faults that all hear of."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.nursery import run_program

from mosaic.ranks.world.cancel import EXIT_CODE

BOUND_S = 120.0
PROGRAMS = "ranks.programs.pipeline.replicated"


@pytest.mark.parametrize(("name", "size"), [("two_of_two", 4), ("of_whole_models", 2), ("tried", 4)])
def test_replicas_of_pipelines_train_as_the_plain_loop_does(tmp_path: Path, name: str, size: int):
    ended = run_program(f"{PROGRAMS}:{name}", size, tmp_path / name, seconds=BOUND_S)
    assert [(one.code, one.said) for one in ended] == [(0, "equal\n")] * size


def test_an_error_in_one_replica_ends_the_ranks_of_all_which_name_it(tmp_path: Path):
    ended = run_program(f"{PROGRAMS}:an_error_in_one_replica", 4, tmp_path / "ranks", seconds=BOUND_S)
    for rank, one in enumerate(ended):
        assert one.code in (1, EXIT_CODE), one
        assert "ValueError: no such caption" in one.said, one
        if rank != 1:
            assert "RankFailedError: rank 1 failed in " in one.said, one.said


def test_ranks_with_other_weights_are_refused(tmp_path: Path):
    for one in run_program(f"{PROGRAMS}:with_other_weights", 2, tmp_path / "ranks", seconds=BOUND_S):
        assert one.code == 1
        assert "the ranks' models have other weights" in one.said
