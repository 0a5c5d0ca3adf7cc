"""The page of the papers' figures: who answers what, one source a line, and reasons where nothing answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.papers.page import kept_studies, paper_table
from bench.papers.printed import PAPERS, Answer, Paper, PaperRow, printed, read_paper
from bench.record import Figure, Source, Study, missing_figure
from bench.solver.generate import BACKBONES, ENCODERS


def study(*figures: Figure, name: str = "bench_x", created: str = "2026-01-02T00:00:00", command: str = "x") -> Study:
    return Study(
        study=name,
        command=command,
        created=created,
        commit="abc",
        python_version="",
        torch_version="",
        machine=None,
        foreign_cpu_share=None,
        figures=figures,
    )


def of(name: str, value: float, source: Source = "measured") -> Figure:
    return Figure(name=name, source=source, value=value)


def lines(row: PaperRow, *studies: Study) -> list[list[str]]:
    paper = Paper(title="T", source="S", testbed="B", pictures="P", rows=(row,))
    return [line.strip("| ").split(" | ") for line in paper_table(paper, kept_studies(studies)).splitlines()[4:]]


ROW = PaperRow(
    at="Fig. 1",
    where="5",
    shows="steps",
    theirs={"a": "1.5"},
    ours=(Answer(study="bench_x", names=r"(\w+): step", says="ratio"),),
)


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_names_each_figure_once_and_each_has_an_answer_or_a_reason(name):
    rows = read_paper(name).rows
    assert len({row.at for row in rows}) == len(rows) > 5
    assert all(row.ours or row.not_yet for row in rows)
    assert all(answer.study.startswith("bench_") or answer.study == "gpu" for row in rows for answer in row.ours)


def test_values_of_two_sources_stand_on_two_lines():
    found = lines(ROW, study(of("a: step", 2.0), of("b: step", 3.0, "simulated"), of("c: other", 4.0)))
    assert [line[-4] for line in found] == ["ratio: a: 2", "ratio: b: 3"]
    assert [line[-3] for line in found] == ["measured, `python -m bench.x`", "simulated, `python -m bench.x`"]
    assert found[0][:3] == ["Fig. 1 (5)", "steps", "a: 1.5"]
    assert found[0][-2:] == ["an unknown machine", "2026-01-02, abc"]


def test_what_is_missing_says_why():
    assert lines(ROW)[0][3] == "not yet: ratio: no result kept"
    assert lines(ROW, study(of("c: other", 1.0)))[0][3] == "not yet: ratio: the kept results do not have it"
    assert lines(ROW, study(missing_figure("a: step", "needs a GPU")))[0][3] == "not yet: ratio: needs a GPU"
    assert lines(ROW, replace(study(of("a: step", 1.0)), dry_run=True))[0][3] == "not yet: ratio: no result kept"
    gpu = replace(ROW, ours=(Answer(study="gpu", names="x"),))
    assert lines(gpu)[0][3] == "not yet: no run on a GPU kept"
    assert lines(replace(ROW, ours=(), not_yet="pipelines are not built"))[0][3] == "not yet: pipelines are not built"
    with pytest.raises(ValueError, match="one of both"):
        replace(ROW, not_yet="no")


def test_instances_are_drawn_from_the_operations_that_table_1_prints():
    theirs = sorted(float(value) for value in printed("mosaic", "Table 1").values())
    assert theirs == sorted(kind.tera_flops for kind in (*BACKBONES, *ENCODERS))
