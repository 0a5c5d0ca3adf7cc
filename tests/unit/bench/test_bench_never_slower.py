"""The study of loops that are never slower."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mosaic
from bench.loops import Workload
from bench.never_slower import AGAIN, ALL_REPAID, LOST_MS, LOST_STEPS, PLAIN_MS, RATIO, REPAID, measure
from mosaic.profiler import ProfileSettings


class Sides(nn.Module):
    """Two towers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


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
