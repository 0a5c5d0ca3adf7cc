"""State that a module reads besides its arguments is as in the plain loop, or the module is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.cases import run_ranks
from ranks.programs.calls.hidden import REFUSED, RIGHT


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of every model on each rank, of one start-up."""
    return run_ranks("ranks.programs.calls.hidden:everything", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", RIGHT)
def test_what_changes_around_a_call_is_for_its_lane_what_it_was_at_the_call(told: list[dict[str, Any]], case: str):
    assert max(rank[case] for rank in told) < 1e-5


@pytest.mark.parametrize("why", REFUSED)
def test_what_only_the_calling_rank_has_is_refused_with_the_module_and_the_way_out(
    told: list[dict[str, Any]], why: str
):
    for rank in told:
        assert "'a' cannot" in rank[why]
        assert why in rank[why]
        assert "colocate(..., exclude=['a'])" in rank[why]


def test_attributes_that_differ_between_ranks_are_named_on_all_of_them(told: list[dict[str, Any]]):
    for number, rank in enumerate(told):
        assert f"attributes of 'a' were set to other values on some of the ranks (on rank {number}" in rank["differing"]
        assert f"scale = {2.0 + number}" in rank["differing"]
