"""Several ranks go the default way: find, profile, solve, try, and train as is faster."""

from __future__ import annotations

from pathlib import Path

from ranks.nursery import run_program

ATTEMPTS = 3
"""For some seconds a busy machine may have no time for anything, and then nothing is faster."""


def test_two_towers_of_one_thread_s_work_end_beside_each_other_and_compute_what_data_parallel_training_does(
    tmp_path: Path,
):
    program = "ranks.programs.choosing.default_way:beside_each_other"
    for attempt in range(ATTEMPTS):
        ended = run_program(program, 2, tmp_path / f"ranks{attempt}", seconds=60.0)
        if all(one.code == 0 for one in ended):
            break
    assert [one.code for one in ended] == [0, 0], "\n".join(one.said for one in ended)
    assert all("done" in one.said for one in ended)
