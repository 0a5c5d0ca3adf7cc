"""The study of tasks that come and go: every way through all phases, held to one loss, and what each change took."""

from __future__ import annotations

import re
from pathlib import Path

from bench.changing.__main__ import study
from bench.changing.phases import PARTS
from bench.changing.workload import TINY
from bench.pages import HIGHLIGHTS, study_table
from bench.record import Study
from mosaic import artifact


def test_every_way_goes_through_all_phases_and_every_change_is_taken_apart(tmp_path: Path):
    path = tmp_path / "host" / "2026-01-01-bench_changing.json"
    path.parent.mkdir()
    made = study(TINY, path=path)
    assert artifact.load(Study, path) == made
    found = {figure.name: figure.value for figure in made.figures}
    assert len(found) == len(made.figures)
    for way in ("replan", "a new start"):
        lost = {part: found.get(f"{way}: lost at a change, {part}, ms", 0.0) for part in PARTS}
        assert lost["find"] > 0
        assert lost["profile"] > 0
        assert (lost["save"] > 0) == (lost["load"] > 0) == (way == "a new start")
        assert sum(lost.values()) <= found[f"{way}: lost at a change, in all, ms"] * 1.001
        assert found[f"{way}: lost at change 1, in plain steps"] > 0
    assert "the first plan: lost at a change, in all, ms" not in found
    assert "phase 1 (image, text, audio, depth): step with replan over the plain step, ratio" in found
    for pattern in HIGHLIGHTS["bench_changing"]:
        assert any(re.fullmatch(pattern, name) for name in found), pattern
    assert "replan: lost at change 1, in plain steps" in study_table("bench_changing", tmp_path)
