"""Plans are tried on all ranks before the loop begins, and nothing of it is left but the choice."""

from __future__ import annotations

import pytest
from ranks.nursery import Ended, run_programs

CASES = ("nothing_left", "slowest_counts", "fails")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    place = tmp_path_factory.mktemp("trial")
    asked = [(f"ranks.programs.choosing.trial:{name}", 2, place / name) for name in CASES]
    return dict(zip(CASES, run_programs(asked, seconds=60.0), strict=True))


def check(ranks: list[Ended]) -> None:
    assert [one.code for one in ranks] == [0, 0], "\n".join(one.said for one in ranks)
    assert all("done" in one.said for one in ranks)


def test_the_faster_plan_runs_and_the_trial_leaves_nothing_else_behind(ended: dict[str, list[Ended]]):
    check(ended["nothing_left"])


def test_a_plan_that_is_slower_on_one_rank_loses_to_data_parallel_training(ended: dict[str, list[Ended]]):
    check(ended["slowest_counts"])


def test_a_plan_that_one_rank_has_no_memory_for_loses_and_is_named_on_all(ended: dict[str, list[Ended]]):
    check(ended["fails"])
