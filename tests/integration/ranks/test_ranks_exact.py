"""With gradients added in a fixed tree, a run has the same bits on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

from ranks.nursery import run_programs


def test_parameters_buffers_and_momenta_are_equal_on_one_two_three_and_four_ranks(tmp_path: Path):
    sizes = (1, 2, 3, 4)
    asked = [("ranks.programs.parameters.exact:train", size, tmp_path / str(size)) for size in sizes]
    for ranks in run_programs(asked, seconds=60.0):
        assert [(rank.code, rank.said) for rank in ranks] == [(0, "")] * len(ranks)
    found = {
        (size, rank): json.loads((tmp_path / str(size) / f"rank{rank}.json").read_text())
        for size in sizes
        for rank in range(size)
    }
    for of_rank in found.values():
        assert of_rank == {count: found[1, 0][count] for count in of_rank}
    assert found[1, 0]["4"] != found[1, 0]["12"]
