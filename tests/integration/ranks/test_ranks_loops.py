"""Loops as people write them compute on two ranks what they compute under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks.cases import run_ranks

EQUAL = (
    "all_gather with gradients",
    "scaled",
    "accumulated",
    "frozen",
    "empty",
    "wrapped by the loop",
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of every loop on each rank, of one start-up."""
    return run_ranks("ranks.programs.running.unchanged:everything", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("loop", EQUAL)
def test_a_loop_has_the_losses_and_parameters_of_distributed_data_parallel(told: list[dict[str, Any]], loop: str):
    for rank in told:
        losses, parameters = rank[loop]
        assert losses < 1e-4
        assert parameters < 1e-4


def test_a_loop_under_autocast_is_that_of_distributed_data_parallel_within_bfloat16(told: list[dict[str, Any]]):
    for rank in told:
        losses, parameters = rank["autocast"]
        assert losses < 0.04  # five steps of bfloat16; gradients are rounded over other rows
        assert parameters < 0.04


def test_rows_that_are_loaded_where_they_are_needed_do_not_travel(told: list[dict[str, Any]]):
    for rank in told:
        equal, loaded, shares = rank["loaded"]
        assert shares == [5, 1]
        assert loaded == equal / 3


def test_what_needs_all_parameters_says_where_they_are(told: list[dict[str, Any]]):
    for rank, missing in zip(told, ("'audio' are on rank 1", "'image' are on rank 0"), strict=True):
        said = rank["refusals"]
        assert missing in said["copy"]
        assert missing in said["part"]
        assert "handle.remove()" in said["disabled"]
        assert "around extra.weight and 1 more" in said["wrapped"]
        assert "colocate the module that holds both" in said["wrapped"]
        assert "cannot know of those on other ranks" in said["norm"]
        assert said["whole"].endswith(", 3)")


def test_a_wrapper_says_what_it_cannot_do(told: list[dict[str, Any]]):
    for rank in told:
        said = rank["wrappers"]
        assert "a rank that has nothing left calls it with a batch of no rows" in said["join"]
        assert "leave the hook out" in said["hook"]
        assert "DistributedDataParallel(..., mixed_precision=...)" in said["mixed"]
        assert "after handle.remove() wrap the plain model again" in said["removed"]


def test_calls_that_differ_between_ranks_raise_on_all_of_them(told: list[dict[str, Any]]):
    first, second = (rank["refusals"] for rank in told)
    for said in (first, second):
        assert "pad to one length on all ranks" in said["padding"]
        assert "other arguments than in the sample's step" in said["keyword"]
        assert "is called with str" in said["kinds"]
    assert "other arguments" in first["one rank"]
    assert second["one rank"] == "'image' could not be called on rank 0, which says why"


def test_plans_that_ranks_cannot_run_together_and_statistics_of_a_batch_are_refused_on_all(told: list[dict[str, Any]]):
    for rank in told:
        other_size, other_plan, normalized = rank["not begun"]
        assert "the plan is for 3 devices and there are 2 ranks; start 3 ranks, or plan" in other_size
        assert "the ranks were given different plans (rank 0: " in other_plan
        assert "image.1 is a BatchNorm1d: its statistics would be those of another batch" in normalized


def test_parameters_that_are_frozen_or_trained_only_since_are_named(told: list[dict[str, Any]]):
    for rank in told:
        assert "image.0.weight and 3 more" in rank["unfrozen"]
        assert "head.bias trained, or did not" in rank["unfrozen"]


def test_a_backward_that_one_rank_leaves_out_ends_both_and_says_where_they_are(tmp_path: Path):
    for said, seconds in run_ranks("ranks.programs.running.unchanged:uneven", 2, tmp_path):
        assert "rank 0: step 1, waiting in" in said
        assert "rank 1: step 1, waiting in the forward of '" in said  # of the first modules, whichever lane came first
        assert "in the same order on all ranks" in said
        assert seconds < 60
