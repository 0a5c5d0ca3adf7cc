"""Pipelines on ranks that are processes, by gloo: what they make, and what is said where one fails."""

from __future__ import annotations

from pathlib import Path

from ranks.nursery import run_programs

BOUND_S = 60.0


def test_random_schedules_make_what_one_thread_makes(tmp_path: Path):
    asked = [("ranks.programs.pipeline.executed:all_equal", size, tmp_path / str(size)) for size in (2, 3, 4)]
    for ended in run_programs(asked, seconds=BOUND_S):
        assert [(one.code, one.said) for one in ended] == [(0, "equal\n")] * len(ended)
