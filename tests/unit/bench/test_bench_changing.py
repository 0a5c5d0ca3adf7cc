"""The study of tasks that come and go: every way through all phases, held to one loss, and what each change took."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.changing.__main__ import study
from bench.changing.phases import PARTS, Passed, go_through
from bench.changing.ways import NewStart, Plain, PlannedAnew
from bench.changing.workload import PHASES, TINY, modalities_of
from bench.pages import HIGHLIGHTS, study_table
from bench.record import Study
from mosaic import artifact
from mosaic.errors import MosaicError


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


def test_a_way_that_trains_another_model_is_no_result(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.changing.phases.WAYS", (Plain, type("Other", (Plain,), {"name": "other", "loss": 1.0})))
    plain = Plain.step_ms

    def step_ms(way: Plain, batch: object) -> float:
        took_ms = plain(way, batch)
        way.loss += way.name == "other"
        return took_ms

    monkeypatch.setattr(Plain, "step_ms", step_ms)
    with pytest.raises(MosaicError, match=r"other has a loss of .* they have to be equal but for rounding"):
        go_through(TINY)


def test_getting_ready_is_no_part_of_the_whole():
    passed = Passed(rounds=[[[1.0, 2.0]], [[3.0]]], changes=[{"find": 100.0}, {"in all": 4.0, "find": 3.0}])
    assert passed.whole_ms == 10.0
    assert passed.steps_ms(0) == [1.0, 2.0]


def test_tasks_come_and_go():
    assert len({modalities_of(tasks) for tasks in PHASES}) == len(PHASES) == 5
    assert (PlannedAnew.name, NewStart.name) == ("replan", "a new start")
