"""A model over several ranks is planned anew in a running loop: parameters and optimizer state move with modules."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.cases import run_ranks


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(
        "ranks.programs.choosing.replan:on_two_ranks",
        2,
        tmp_path_factory.mktemp("replan"),
        arguments=[str(tmp_path_factory.mktemp("saved"))],
        timeout=300,
    )


def test_planned_anew_is_bit_for_bit_a_run_that_stops_and_starts_under_the_other_plan(on_two: list[Any]):
    assert all(is_same for is_same, _, _ in on_two)


def test_modules_that_come_and_go_train_as_they_do_where_nothing_moves(on_two: list[Any]):
    assert all(len(groups) == 4 for _, groups, _ in on_two)


def test_communicators_do_not_pile_up(on_two: list[Any]):
    for _, groups, _ in on_two:
        assert groups[3] <= groups[1] + 2, groups  # another module has two more


def test_what_would_lose_something_is_refused_on_all_ranks(on_two: list[Any]):
    for _, _, said in on_two:
        assert [
            part in text
            for part, text in zip(
                (
                    "needs optimizer=",
                    "an AdamW that was not given has stepped parameters of this model",
                    "in the middle of a step",
                    "has a gradient, which would not move",
                    "the model of rank 1 is not that of rank 0: encoders.depth.0.weight",
                ),
                said,
                strict=True,
            )
        ] == [True] * 5, said
