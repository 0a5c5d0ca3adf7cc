"""What loops do beside steps of a pipeline: low precision, averages, evaluation, checkpoints, what is no number."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.nursery import run_program

BOUND_S = 120.0
PROGRAMS = (
    *("under_autocast", "with_averages", "evaluated", "exchanged"),
    *("with_what_is_not_a_number", "with_normalized_batches"),
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_around_a_pipeline_do_what_the_plain_loop_does(tmp_path: Path, name: str):
    ended = run_program(f"ranks.programs.pipeline.loops:{name}", 2, tmp_path / "ranks", seconds=BOUND_S)
    assert [(one.code, one.said) for one in ended] == [(0, "equal\n")] * 2
