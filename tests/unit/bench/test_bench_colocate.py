"""The study of Mosaic's own cost: every figure by name, nulls with a reason, goals judged by their interval."""

from __future__ import annotations

import pytest
from torch import nn

from bench.colocate import models as colocate_models
from bench.colocate.__main__ import Scale, study
from bench.colocate.calls import ALONE
from bench.colocate.models import Loop, goals, in_rounds, plain_name, sequential_name
from bench.record import Figure, Study
from mosaic import artifact
from mosaic.microbench import Budget
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


def figures(plain_ms: float, ratio: tuple[float, float, float]) -> list[Figure]:
    low, value, high = ratio
    found = [Figure(name=ALONE, source="measured", value=5.0, low=4.0, high=30.0)]
    for name in PAPER_MODELS:
        found += [
            Figure(name=sequential_name(name, size), source="measured", value=value, low=low, high=high)
            for size in ("tiny", "public", "paper")
        ]
        found.append(Figure(name=plain_name(name, "tiny"), source="measured", value=plain_ms, low=1.0, high=40.0))
    return found


def test_a_goal_is_met_by_its_interval_and_not_by_its_median():
    lines = goals(figures(30.0, (0.99, 1.0, 1.005)))
    assert lines[0].startswith("open")
    assert sum(line.startswith("met") for line in lines) == 6 * 3
    assert sum(line.startswith("not met") for line in goals(figures(30.0, (1.05, 1.1, 1.2)))) == 6 * 3
    assert not any(line.startswith("met") for line in goals(figures(30.0, (0.9, 1.0, 1.2)))[1:])


def test_rounds_are_taken_in_turn_and_end_with_the_budget():
    order: list[str] = []

    class Noted(Loop):
        def step_ms(self) -> float:
            order.append(self.batch["name"])
            return 100.0

    loops = [Noted(nn.Linear(1, 1), None, {"name": name}) for name in ("plain", "ours")]  # type: ignore[arg-type]
    plain_ms, ratios = in_rounds(*loops, 10, Budget(0.0))
    assert ratios == [1.0] * 3
    assert len(plain_ms) == 9
    ours, plain = ["ours"] * 3, ["plain"] * 3
    assert order[5:] == [*ours, *plain, *plain, *ours, *ours, *plain]


def test_a_model_is_measured_against_its_plain_copy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(colocate_models, "_ROUND_MS", 0.0)
    plain, ratio = colocate_models._sequential("clip", 1, Budget(0.0))
    assert plain.name == plain_name("clip", "tiny")
    assert ratio.value is not None
    assert ratio.value > 0
