"""The page of the papers' figures: who answers what, one source a line, and reasons where nothing answers."""

from __future__ import annotations

import pytest

from bench.papers.printed import PAPERS, printed, read_paper
from bench.solver.generate import BACKBONES, ENCODERS


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_names_each_figure_once_and_each_has_an_answer_or_a_reason(name):
    rows = read_paper(name).rows
    assert len({row.at for row in rows}) == len(rows) > 5
    assert all(answer.study.startswith("bench_") or answer.study == "gpu" for row in rows for answer in row.ours)


def test_instances_are_drawn_from_the_operations_that_table_1_prints():
    theirs = sorted(float(value) for value in printed("mosaic", "Table 1").values())
    assert theirs == sorted(kind.tera_flops for kind in (*BACKBONES, *ENCODERS))
