"""The study of loops that are never slower: its figures, its verdict by intervals, and its table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mosaic
from bench.colocate.models import Workload
from bench.never_slower.turns import AGAIN, ALL_REPAID, LOST_MS, LOST_STEPS, PLAIN_MS, RATIO, REPAID, measure
from bench.record import Figure
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
