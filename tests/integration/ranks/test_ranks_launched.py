"""Bad input to a program on several ranks: every rank ends in time with an exit code and says why."""

from __future__ import annotations

from pathlib import Path

from ranks.nursery import run_programs

SAID = {
    "a_script_that_is_refused": (
        "the plan is for 3 devices and there are 2 ranks; start 3 ranks, or plan",
        "the ranks were given different plans (rank 0: ",
        "image.1 is a BatchNorm1d: its statistics would be those of another batch",
        "other arguments that are no tensors (numbers, flags, strings)",
    ),
    "mosaic_run_with_a_plan_for_each_rank": ("mosaic: the ranks were given different plans (rank 0: ",),
}


def test_bad_input_ends_every_rank_with_exit_code_1_and_the_reason(tmp_path: Path):
    programs = [(f"ranks.programs.meeting.launched:{name}", 2, tmp_path / name) for name in SAID]
    for sentences, ended in zip(SAID.values(), run_programs(programs, seconds=60.0), strict=True):
        for rank in ended:
            assert rank.code == 1, rank.said
            for sentence in sentences:
                assert sentence in rank.said, rank.said
