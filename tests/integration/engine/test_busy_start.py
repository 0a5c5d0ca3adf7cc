"""A loop and commands that start while other processes use the CPU: measured, marked, and measured again later."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from engine_cases import TwoTowers, pair_batch
from foreign_load import others_use

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import handle as handles
from mosaic.profiler import ProfileSettings

BUSY = ProfileSettings(retry_seconds=0.0, sample_seconds=0.05, min_repeats=2, max_repeats=3)
NOTE = "other processes used 61% of the CPU; times are not comparable"


def begin(model: TwoTowers, **options: Any) -> mosaic.Handle:
    given = mosaic.Options(**{"cache": None, "profiling": BUSY, "trial": None, **options})
    return mosaic.colocate(model, sample=pair_batch(), backend=HostBackend(num_slots=2), options=given)


def train(model: TwoTowers, steps: int) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(*pair_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_modules_are_profiled_again_after_100_steps_and_then_after_1000_once_others_are_gone(
    model: TwoTowers, has_optimizer: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert (handles._FIRST_RETRY, handles._LATER_RETRY) == (100, 1000)
    monkeypatch.setattr(handles, "_FIRST_RETRY", 10)
    monkeypatch.setattr(handles, "_LATER_RETRY", 20)
    others_use(monkeypatch, 0.61)
    with caplog.at_level(logging.WARNING, logger="mosaic"):
        plain, handle = copy.deepcopy(model), begin(model)
    assert handle.plan.foreign_cpu_share == 0.61
    assert f"while the modules were profiled, {NOTE}" in [record.getMessage() for record in caplog.records]
    assert f"while the modules were profiled, {NOTE}" in handle.describe().splitlines()
    replans: list[int] = []

    def take(steps: int) -> None:
        for one in (plain, model):
            if has_optimizer:
                train(one, steps)
                continue
            for step in range(steps):
                with torch.no_grad():
                    one(*pair_batch(step))
        replans.append(int(handle.metrics()["replans"]))

    take(9 if has_optimizer else 9 + 7)  # calls without gradients count as steps after eight
    others_use(monkeypatch, 0.3)
    take(2)  # others are still there
    others_use(monkeypatch, 0.01)
    take(18)
    take(2)
    assert replans == [0, 0, 0, 1]
    assert handle.profile is not None
    assert handle.profile.environment.foreign_cpu_share == 0.01
    assert "planned anew: other processes no longer use the CPU" in handle.describe()
    assert "not comparable" not in handle.describe()
    handle.remove()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
