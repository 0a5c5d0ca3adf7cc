"""Several ranks go the default way: find, profile, solve, try, and train as is faster."""

from __future__ import annotations

from pathlib import Path

from ranks.nursery import run_program


def test_two_towers_of_one_thread_s_work_end_beside_each_other_and_compute_what_data_parallel_training_does(
    tmp_path: Path,
):
    ended = run_program("ranks.programs.choosing.default_way:beside_each_other", 2, tmp_path / "ranks", seconds=60.0)
    assert [one.code for one in ended] == [0, 0], "\n".join(one.said for one in ended)
    assert all("done" in one.said for one in ended)
