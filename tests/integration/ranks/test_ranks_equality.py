"""A loop that is colocated over ranks computes what DistributedDataParallel computes on the same global batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.cases import run_ranks

TOLERANCE = 1e-4
"""Of a loss, and of a tensor's largest value, after the loop's steps: sums are added up in another order."""


@pytest.mark.parametrize("size", [2, 4])
def test_random_graphs_under_random_layouts_train_as_under_distributed_data_parallel(tmp_path: Path, size: int):
    told = run_ranks("ranks.programs.parameters.equality:random_graphs", size, tmp_path)
    assert len({case["kind"] for case in told[0]}) >= (5 if size == 2 else 2)
    assert {"none", "head", "glue", "both"} & {case["tie"] for case in told[0]}
    for rank, cases in enumerate(told):
        for case in cases:
            assert case["loss"] < TOLERANCE, (rank, case)
            assert case["parameters"] < TOLERANCE, (rank, case)


def test_two_ranks_that_both_run_every_module_compute_the_same_bits(tmp_path: Path):
    assert run_ranks("ranks.programs.parameters.equality:bit_for_bit", 2, tmp_path) == [[True] * 3] * 2


def test_activation_checkpointing_of_a_part_that_is_used_twice_has_right_gradients(tmp_path: Path):
    assert run_ranks("ranks.programs.parameters.equality:checkpointed", 2, tmp_path) == [True, True]
