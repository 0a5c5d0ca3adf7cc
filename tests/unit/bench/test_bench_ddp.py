"""The study against DistributedDataParallel at a size that takes a moment."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from engine_cases import FAST
from torch import nn

from bench.ddp import __main__ as bench_ddp
from bench.ddp import models, tables
from bench.ddp.turns import Scale, launch
from bench.harness import study_of
from mosaic.engine.options import Options
from mosaic.profiler import ForeignLoad


def small(batch: torch.Generator) -> models.Workload:
    def tower() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    inputs = {name: torch.randn(3, 4, generator=batch) for name in "ab"}
    return models.Workload(models.TwoTowers(tower(), tower()), inputs, torch.Tensor.mean)


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks a process whose autograd may have threads of the GPU")
def test_both_ways_end_with_equal_parameters_and_stand_in_one_row(monkeypatch: pytest.MonkeyPatch):
    for module in (models, tables, bench_ddp):
        monkeypatch.setattr(module, "MODELS", {"small": small})
    monkeypatch.setattr(bench_ddp, "launch", partial(launch, options=Options(profiling=FAST)))
    load = ForeignLoad()
    scale = Scale(rounds=2, steps=1, warm_steps=1, settings=2)
    figures = list(bench_ddp.of_model(60.0, name="small", scale=scale, launches=1))
    by_name = {figure.name: figure for figure in figures}
    gain = by_name["small: step of DistributedDataParallel at its best over mosaic.colocate's, ratio"]
    assert len(gain.samples) == 2
    assert by_name["small: length of the difference of all parameters over theirs, ratio"].value == pytest.approx(
        0, abs=1e-5
    )
    assert all(len(one.samples) == int(one.labels["samples"]) for one in figures)
    head, _, row, *_ = tables.ddp_table(study_of("bench_ddp", figures, load)).splitlines()
    assert head.count("|") == row.count("|")
    assert " of 1 times" in row
