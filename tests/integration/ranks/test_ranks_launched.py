"""Bad input to a program on several ranks: every rank ends in time with an exit code and says why."""

from __future__ import annotations

import pytest
from ranks.nursery import Ended, run_programs

BOUND_S = 60.0
"""After this a rank counts as hanging."""
SAID = {
    "a_script_with_a_plan_for_more_ranks": "the plan is for 3 devices and there are 2 ranks; start 3 ranks, or plan",
    "a_script_with_a_plan_for_each_rank": "the ranks were given different plans (rank 0: ",
    "a_script_with_batch_norm": "image.1 is a BatchNorm1d: its statistics would be those of another batch",
    "a_script_with_an_input_that_cannot_be_sent": "other arguments that are no tensors (numbers, flags, strings)",
    "mosaic_run_with_a_plan_for_more_ranks": "mosaic: the plan is for 3 devices and there are 2 ranks; start 3 ranks",
    "mosaic_run_with_a_plan_for_each_rank": "mosaic: the ranks were given different plans (rank 0: ",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    folder = tmp_path_factory.mktemp("launched")
    asked = [(f"ranks.programs.meeting.launched:{name}", 2, folder / name) for name in SAID]
    return dict(zip(SAID, run_programs(asked, seconds=BOUND_S), strict=True))


@pytest.mark.parametrize("case", SAID)
def test_bad_input_ends_every_rank_with_exit_code_1_and_the_reason(ended: dict[str, list[Ended]], case: str):
    for rank in ended[case]:
        assert rank.code == 1, rank.said
        assert SAID[case] in rank.said, rank.said
