"""``bench.cost`` at its smallest: every figure by name, and nothing that judges was fitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cost import __main__ as bench_cost
from bench.cost.study import TINY
from bench.record import Study
from mosaic import artifact
from mosaic.backends.host.backend import HostBackend


def test_every_figure_is_written_once_by_name_with_a_number_or_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bench_cost, "HostBackend", lambda: HostBackend(2))
    study = bench_cost.STUDY.run(bench_cost.parts(TINY, 60.0), path=tmp_path / "study.json")
    assert artifact.load(Study, tmp_path / "study.json") == study
    assert len({figure.name for figure in study.figures}) == len(study.figures)
    assert all(figure.samples if figure.value is not None else figure.reason for figure in study.figures)
    assert sum(figure.value is not None for figure in study.figures) > 5
