"""The study of Mosaic's own cost."""

from __future__ import annotations

from pathlib import Path

from bench.colocate import study
from bench.record import Study
from mosaic import artifact


def test_calls_are_measured_and_models_without_time_have_a_reason(tmp_path: Path):
    made = study(calls=100, rounds=1, seconds=0.0, path=tmp_path / "study.json")
    assert artifact.load(Study, tmp_path / "study.json") == made
    figures = {figure.name: figure for figure in made.figures}
    assert len(figures) == len(made.figures)
    assert all((figure.value is None) == bool(figure.reason) for figure in figures.values())
    assert figures["placed call of an empty module on a lane, launched, us"].value
    assert figures["clip, tiny: plain step, ms"].reason
