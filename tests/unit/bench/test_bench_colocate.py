"""The study of Mosaic's own cost: every figure by name, nulls with a reason, goals judged by their interval."""

from __future__ import annotations

import pytest

from bench.colocate.__main__ import Scale, study
from bench.colocate.models import goals, plain_name, sequential_name
from bench.record import Study
from mosaic import artifact
from mosaic.models import PAPER_MODELS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Study:
    path = tmp_path_factory.mktemp("study") / "study.json"
    result = study(Scale(calls=100, rounds=1, seconds=0.0), path=path)
    assert artifact.load(Study, path) == result
    return result


def test_every_model_has_its_figures_in_every_size_and_a_null_has_a_reason(made: Study):
    by_name = {figure.name: figure for figure in made.figures}
    assert len(by_name) == len(made.figures)
    for name in PAPER_MODELS:
        wanted = [sequential_name(name, size) for size in ("tiny", "public", "paper")]
        for figure in [by_name[key] for key in (*wanted, plain_name(name, "tiny"))]:
            assert (figure.value is None) == bool(figure.reason)
    assert sum(line.startswith("not measured") for line in goals(made.figures)) >= len(PAPER_MODELS) * 2
