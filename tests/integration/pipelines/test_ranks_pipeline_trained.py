"""``mosaic.pipeline`` on ranks that are processes: the plain loop's losses and gradients, and its checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks.nursery import run_program

BOUND_S = 120.0
PROGRAMS = "ranks.programs.pipeline.trained"


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("planned_by_default", 2),
        ("in_every_way", 2),
        ("on_lanes", 2),
        ("with_frozen_towers", 3),
        ("with_dropout", 2),
        ("with_a_scaler", 3),
        ("of_one_schedule", 2),
        ("too_large_for_a_rank", 2),
    ],
)
def test_models_of_the_users_train_in_pipelines_as_in_the_plain_loop(tmp_path: Path, name: str, size: int):
    ended = run_program(f"{PROGRAMS}:{name}", size, tmp_path / name, seconds=BOUND_S)
    assert [(one.code, one.said) for one in ended] == [(0, "equal\n")] * size


def test_a_checkpoint_of_a_pipeline_goes_on_with_another_number_of_ranks(tmp_path: Path):
    for name, size, said in (("saved", 2, "saved\n"), ("resumed", 3, "equal\n")):
        ended = run_program(f"{PROGRAMS}:{name}", size, tmp_path / name, seconds=BOUND_S)
        assert [(one.code, one.said) for one in ended] == [(0, said)] * size


def test_ranks_with_other_microbatches_end_with_an_error_that_says_so(tmp_path: Path):
    ended = run_program(f"{PROGRAMS}:with_other_microbatches", 2, tmp_path / "ranks", seconds=BOUND_S)
    for one in ended:
        assert one.code == 1
        assert "give all ranks the same microbatches" in one.said


def test_the_example_is_killed_restarted_and_ends_with_the_plain_loops_weights(tmp_path: Path):
    (ended,) = run_program("ranks.programs.pipeline.restarted:restarted", 1, tmp_path / "ranks", seconds=BOUND_S)
    assert ended.code == 0, ended.said
    assert ended.said.endswith("equal\n"), ended.said
    resumed = [int(step) for step in re.findall(r"step (\d+): loss", ended.said)]
    killed = int(re.findall(r"killed rank \d at step (\d+)", ended.said)[0])
    assert resumed[:killed] == list(range(killed)), ended.said
    assert resumed[killed] in (killed - killed % 2, killed - killed % 2 - 2), "it goes on from a checkpoint"
