"""Stories: the same line on several ranks, pipelines, and sequences that ranks share."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks.nursery import run_program

HERE = Path(__file__).parent
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra transformers")


def run_on_ranks(function: str, size: int, folder: Path) -> None:
    """Runs a program on ranks that are forked from a process that has loaded torch, where torchrun would start them."""
    for rank, ended in enumerate(run_program(function, size, folder, seconds=120)):
        assert ended.code == 0, f"rank {rank} ended with {ended.code}\n{ended.said}"


def test_two_ranks_of_torchrun_train_as_under_distributed_data_parallel(tmp_path: Path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend=c10d"]
    command = [*launch, "--rdzv-endpoint=localhost:0", str(HERE / "story_ranks.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_module_on_one_of_two_ranks_trains_as_on_both(tmp_path: Path):
    run_on_ranks("story_ranks:one_of_two_ranks", 2, tmp_path)


@needs_transformers
@pytest.mark.parametrize("size", [2, 4])
def test_llava_in_a_pipeline_trains_as_in_the_plain_loop(tmp_path: Path, size: int):
    run_on_ranks("story_pipelines:llava", size, tmp_path)


@needs_transformers
def test_microbatches_may_be_ragged_and_lack_images(tmp_path: Path):
    run_on_ranks("story_pipelines:ragged", 2, tmp_path)


@needs_transformers
def test_encoders_on_lanes_beside_the_backbone_train_as_in_the_plain_loop(tmp_path: Path):
    run_on_ranks("story_pipelines:lanes", 1, tmp_path)


@needs_transformers
def test_two_ranks_that_share_a_sequence_have_the_gradients_of_one_process(tmp_path: Path):
    run_on_ranks("story_pipelines:context", 2, tmp_path)
