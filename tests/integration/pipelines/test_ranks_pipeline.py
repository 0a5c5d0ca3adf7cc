"""Pipelines on ranks that are processes, by gloo: what they make, and what is said where one fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks.nursery import Ended, run_programs

from mosaic.ranks.world.cancel import EXIT_CODE

BOUND_S = 60.0
SIZES = {
    "an_error_in_a_backward": 3,
    "an_error_on_a_lane": 2,
    "killed_in_a_backward": 3,
    "killed_in_a_send": 3,
    "a_tensor_of_another_shape": 2,
    "a_tensor_on_another_device": 2,
    "another_schedule": 3,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    folder = tmp_path_factory.mktemp("pipelines")
    asked = [(f"ranks.programs.pipeline.executed:{name}", size, folder / name) for name, size in SIZES.items()]
    return dict(zip(SIZES, run_programs(asked, seconds=BOUND_S), strict=True))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("an_error_in_a_backward", "rank 1 failed in 1B2: ValueError: no such caption"),
        ("an_error_on_a_lane", "rank 0 failed in 1B0: ValueError: no such caption"),
        ("a_tensor_of_another_shape", "rank 1 failed in SEND(1B0>0B0): ModuleContractError: "),
    ],
)
def test_a_failed_action_ends_all_ranks_which_name_it_and_the_reason(
    outcomes: dict[str, list[Ended]], case: str, said: str
):
    for rank, one in enumerate(outcomes[case]):
        assert one.code in (1, EXIT_CODE), one
        if f"rank {rank} failed" not in said:
            assert f"RankFailedError: {said}" in one.said, one.said


@pytest.mark.parametrize("case", ["killed_in_a_backward", "killed_in_a_send"])
def test_a_killed_rank_ends_the_others_which_name_it_and_where_it_was(outcomes: dict[str, list[Ended]], case: str):
    killed = outcomes[case][1]
    assert killed.code == -9
    for one in outcomes[case][:1] + outcomes[case][2:]:
        assert one.code in (1, EXIT_CODE), one
        assert re.search(r"rank 1 \(\S+, process \d+\) is not heard of after", one.said), one.said
        assert "Last seen: " in one.said


def test_another_schedule_on_one_rank_is_refused_on_all_and_costs_nothing_else(outcomes: dict[str, list[Ended]]):
    for one in outcomes["another_schedule"]:
        assert one.code == 0, one
        assert one.said.startswith("the ranks have not the same schedule: rank 1 has ")
        assert one.said.endswith("\nthen equal\n")


def test_a_tensor_that_gloo_cannot_send_is_refused(outcomes: dict[str, list[Ended]]):
    for one in outcomes["a_tensor_on_another_device"]:
        assert one.code == 0
        assert "gloo of ranks on cpu cannot send 0F0>1F0" in one.said
        assert "found: tensors on meta" in one.said


def test_random_schedules_make_what_one_thread_makes(tmp_path: Path):
    asked = [("ranks.programs.pipeline.executed:all_equal", size, tmp_path / str(size)) for size in (2, 3)]
    for ended in run_programs(asked, seconds=BOUND_S):
        assert [(one.code, one.said) for one in ended] == [(0, "equal\n")] * len(ended)


def test_torchs_own_runtime_makes_the_same_gradients_of_a_chains_schedule(tmp_path: Path):
    asked = ("ranks.programs.pipeline.judged:equal_gradients", 2, tmp_path / "ranks")
    (ended,) = run_programs([asked], seconds=BOUND_S)
    assert [one.code for one in ended] == [0, 0], ended
    assert all(one.said.endswith("equal\n") for one in ended)
