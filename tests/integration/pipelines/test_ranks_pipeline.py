"""Pipelines on ranks that are processes make what one process makes: losses, gradients, checkpoints and scores."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.nursery import run_program

BOUND_S = 400.0


@pytest.mark.parametrize(
    ("program", "size"),
    [
        ("executed:all_equal", 3),
        ("kept:on_two_ranks", 2),
        ("loops:on_two_ranks", 2),
        ("replicated:on_two_ranks", 2),
        ("replicated:on_four_ranks", 4),
        ("shared_layers:on_two_ranks", 2),
        ("shared_layers:on_four_ranks", 4),
        ("shared_sequences:on_two_ranks", 2),
        ("shared_sequences:on_four_ranks", 4),
    ],
)
def test_a_pipeline_trains_as_the_plain_loop_does(tmp_path: Path, program: str, size: int):
    check_equal(program, size, tmp_path / "ranks")


def test_users_models_train_as_in_the_plain_loop_and_checkpoints_go_on_with_another_number_of_ranks(tmp_path: Path):
    check_equal("trained:on_two_ranks", 2, tmp_path / "two")
    check_equal("trained:on_three_ranks", 3, tmp_path / "three")


def check_equal(program: str, size: int, place: Path) -> None:
    ended = run_program(f"ranks.programs.pipeline.{program}", size, place, seconds=BOUND_S)
    assert [(one.code, one.said.endswith("equal\n")) for one in ended] == [(0, True)] * size, ended
