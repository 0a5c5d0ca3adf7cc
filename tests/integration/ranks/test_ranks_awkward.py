"""Ordinary loops that need more parameters or rows than a rank has are right, or are told what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.cases import run_ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of every loop on each rank, of one start-up."""
    return run_ranks("ranks.programs.parameters.awkward:everything", 2, tmp_path_factory.mktemp("ranks"))


def test_an_average_that_follows_on_the_same_ranks_is_that_of_data_parallel_training(told: list[dict[str, Any]]):
    assert max(rank["momentum"][0] for rank in told) < 1e-6


def test_an_average_that_follows_from_another_rank_is_refused_where_it_would_be_written(told: list[dict[str, Any]]):
    first, second = (rank["momentum"][1] for rank in told)
    assert first == "nothing", "this rank has nothing to write into"
    assert "add_() needs values of 'a', which are on rank 0 only" in second
    assert "handle.full_state_dict()" in second


def test_sparse_gradients_are_those_of_data_parallel_training(told: list[dict[str, Any]]):
    assert max(max(rank["sparse"]) for rank in told) < 1e-6


def test_what_reads_a_parameter_of_another_rank_is_told_how_to_have_it(told: list[dict[str, Any]]):
    for rank, (name, other) in zip(told, (("b", 1), ("a", 0)), strict=True):
        assert f"needs values of {name!r}, which are on rank {other} only" in rank["reading"]["an optimizer's state"]
        assert "handle.full_state_dict(), called on every rank" in rank["reading"]["an optimizer's state"]


@pytest.mark.parametrize("name", ["LBFGS", "ZeRO"])
def test_an_optimizer_that_needs_all_parameters_is_refused_on_all_ranks(told: list[dict[str, Any]], name: str):
    for rank in told:
        assert "make an optimizer that steps each parameter by itself" in rank["reading"][name]


def test_a_model_that_is_colocated_twice_is_refused(told: list[dict[str, Any]]):
    for rank in told:
        assert "is colocated already; call handle.remove()" in rank["reading"]["again"]
