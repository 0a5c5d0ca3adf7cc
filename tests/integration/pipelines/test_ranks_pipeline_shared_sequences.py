"""Sequences that ranks of a pipeline share: the plain loop's gradients, on any grid, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.nursery import run_program

BOUND_S = 150.0
PROGRAMS = "ranks.programs.pipeline.shared_sequences"


@pytest.mark.parametrize(
    ("name", "size"), [("of_two", 2), ("packed_and_padded", 2), ("of_four", 4), ("beside_others", 4), ("refused", 2)]
)
def test_sequences_that_ranks_share_train_as_the_plain_loop_does(tmp_path: Path, name: str, size: int):
    ended = run_program(f"{PROGRAMS}:{name}", size, tmp_path / name, seconds=BOUND_S)
    assert [(one.code, one.said.endswith("equal\n")) for one in ended] == [(0, True)] * size, ended
