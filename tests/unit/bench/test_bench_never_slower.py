"""The study of loops that are never slower: its figures, its verdict by intervals, and its table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mosaic
from bench.colocate.models import Workload
from bench.never_slower import tables
from bench.never_slower.__main__ import with_counts
from bench.never_slower.models import MODELS, RECURRENT
from bench.never_slower.turns import AGAIN, ALL_REPAID, LOST_MS, LOST_STEPS, PLAIN_MS, RATIO, REPAID, measure
from bench.record import Figure, Study
from mosaic.artifact import save
from mosaic.profiler import ProfileSettings


class Sides(nn.Module):
    """Two towers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


def of(model: str, low: float, value: float, high: float) -> Figure:
    labels = {"model": model, "runs": "left:1+right:1", "decided": "it won", "foreign CPU share": "0.00"}
    return Figure(name=f"{model}: {RATIO}", source="measured", value=value, low=low, high=high, labels=labels)


def test_a_model_has_all_its_figures_with_what_ran_and_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")  # put back after the test
    settings = ProfileSettings(sample_seconds=0.01, foreign_share=2.0)
    work = Workload(model=Sides(), batch={"x": torch.randn(4, 8)}, loss=lambda made: made.square().mean())
    options = mosaic.Options(profiling=settings)
    found = {figure.name: figure for figure in measure("sides", lambda: work, rounds=3, seconds=0.0, options=options)}
    assert {f"sides: {name}" for name in (RATIO, AGAIN, PLAIN_MS, LOST_MS, LOST_STEPS, REPAID, ALL_REPAID)} <= set(
        found
    )
    labels = found[f"sides: {RATIO}"].labels
    assert labels["runs"] == "the plain loop" or "left" in labels["runs"]
    assert labels["decided"]
    assert all((figure.value is None) == bool(figure.reason) for figure in found.values())


def test_a_model_counts_as_slower_or_faster_where_its_whole_interval_says_so():
    found = [of("a", 0.8, 0.9, 0.99), of("b", 0.9, 1.1, 1.2), of("c", 1.01, 1.1, 1.2), of("d", 1.2, 2, 3)]
    again = Figure(name=f"a: {AGAIN}", source="measured", value=0.8, low=0.7, high=0.9)
    assert [figure.value for figure in with_counts([*found, again])[:4]] == [1, 2, 1, 1]


@pytest.mark.parametrize("name", [RECURRENT, "mosaic demo's"])
def test_the_models_that_no_other_study_has_can_be_trained(name):
    work = MODELS[name]()
    work.loss(work.model(**work.batch)).backward()
    assert all(parameter.grad is not None for parameter in work.model.parameters())
    assert len(MODELS) == 8


def test_the_table_has_a_row_for_each_model(tmp_path):
    figures = [of("a", 1.01, 1.1, 1.2), Figure(name=f"a: {LOST_MS}", source="measured", value=12.0)]
    (tmp_path / "host").mkdir()
    save(made_of(figures), tmp_path / "host" / "x-bench_never_slower.json")
    row = tables.never_slower_table(tmp_path).splitlines()[2]
    assert row == "| a | - | 1.100 (1.010 to 1.200) | - | left:1+right:1 | 12 | - | - | 0.00 |"
    assert tables.never_slower_table(tmp_path / "host") == "not measured yet\n"


def made_of(figures: list[Figure]) -> Study:
    return Study(
        study="bench_never_slower",
        command="x",
        created="2026-01-01",
        commit="abc",
        python_version="",
        torch_version="",
        machine=None,
        foreign_cpu_share=None,
        figures=tuple(figures),
    )
