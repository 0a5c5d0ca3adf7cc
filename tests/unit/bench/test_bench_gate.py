"""The study of the gate: its populations are what they say, and its figures are read back as tables."""

from __future__ import annotations

import json
from pathlib import Path

from bench import pages
from bench.gate import tables
from bench.gate.__main__ import STUDY
from bench.gate.parts import margins, poison, slices
from bench.study_parts import StudyPart


def test_every_part_makes_figures_and_the_table_has_a_line_a_margin(tmp_path: Path):
    kept = tmp_path / "host" / "2026-11-22-abc-bench_gate.json"
    parts = (
        StudyPart.alone("margins", 60, lambda: margins(((200, 1, 0.05), (200, 20, 0.05)), trials=3)),
        StudyPart.alone("slices", 60, lambda: slices(trials=2)),
        StudyPart.alone("poison", 60, lambda: poison(trials=2)),
    )
    STUDY.run(parts, path=kept)
    figures = json.loads(kept.read_text())["figures"]
    assert all(figure["value"] is not None for figure in figures)
    lines = tables.margins_table(tmp_path).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| margin 5, 200 rows", "| margin 5, 200 rows in 10 groups"]
    assert len({line.count("|") for line in lines}) == 1
    assert "one slice of 8 loses 12 points: refused for a slice, %" in pages.study_table("bench_gate", tmp_path)
