"""A loop that is colocated over ranks computes what DistributedDataParallel computes on the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks.cases import run_ranks

TOLERANCE = 1e-4
"""Of a loss, and of a tensor's largest value, after the loop's steps: sums are added up in another order."""


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("ranks.programs.parameters.equality:on_two_ranks", 2, tmp_path_factory.mktemp("ranks"))


def check(told: list[list[dict[str, Any]]], num_kinds: int) -> None:
    assert len({case["kind"] for case in told[0]}) >= num_kinds
    assert {"none", "head", "glue", "both"} & {case["tie"] for case in told[0]}
    for rank, cases in enumerate(told):
        for case in cases:
            assert case["loss"] < TOLERANCE, (rank, case)
            assert case["parameters"] < TOLERANCE, (rank, case)


def test_random_graphs_under_random_layouts_train_as_under_distributed_data_parallel(
    on_two: list[dict[str, Any]], tmp_path: Path
):
    check([found["graphs"] for found in on_two], 5)
    check(run_ranks("ranks.programs.parameters.equality:random_graphs", 4, tmp_path), 2)


def test_two_ranks_that_both_run_every_module_compute_the_same_bits(on_two: list[dict[str, Any]]):
    assert [found["same bits"] for found in on_two] == [[True] * 3] * 2


def test_activation_checkpointing_of_a_part_that_is_used_twice_has_right_gradients(on_two: list[dict[str, Any]]):
    assert [found["checkpointed"] for found in on_two] == [True, True]
