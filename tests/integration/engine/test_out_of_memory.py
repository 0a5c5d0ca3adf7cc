"""A module for which there is no memory beside the others runs in place, behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import stream_cases
import torch
from engine_cases import (
    SIDE_BY_SIDE,
    Outside,
    Record,
    Trap,
    TwoTowers,
    pair_batch,
    run_both,
    tower,
)
from torch import nn

from mosaic.engine.calls.thread_state import on_lane

WORDS = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)


def torch_error() -> Exception:
    return RuntimeError(f"{WORDS} 400000000000 bytes. Error code 12 (Cannot allocate memory)")


class Hungry(nn.Module):
    """Finds no memory in its next ``failures`` calls on a lane, in the middle of its work."""

    failures = Outside(0)

    def __init__(self, *extra: nn.Module, error: Callable[[], Exception] = torch_error) -> None:
        super().__init__()
        self.first = tower()
        self.extra = nn.Sequential(*extra)
        self.last = nn.Linear(16, 16)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.extra(self.first(x))
        if on_lane() and self.failures:
            self.failures -= 1
            raise self.error()
        return self.last(hidden)


@pytest.mark.parametrize("error", [torch_error, MemoryError])
def test_a_forward_without_memory_on_its_lane_runs_in_place_and_the_loop_stays_the_plain_loop(error: Any):
    def loop(model: Any, record: Record) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(6):
            model.left.failures = step % 2
            x, y = pair_batch(step)
            loss = model(x.requires_grad_(), y).square().mean()
            loss.backward()
            optimizer.step()
            record.note(loss, x.grad)
            record.note_model(model, optimizer)
            optimizer.zero_grad()
            model.left.failures = 0

    described = run_both(
        lambda: TwoTowers(Hungry(nn.Dropout(0.5), nn.BatchNorm1d(16), error=error)), pair_batch(), SIDE_BY_SIDE, loop
    )
    assert "there was no memory for it beside the others" in described
    assert "engine_cases.py" in described.split("calls of left ran in place")[1]


class HungryOnStream(Trap):
    """Needs more memory than there is while another module runs beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order == "hungry" and on_lane():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().forward(x)


def test_a_module_without_memory_on_its_stream_is_run_again_in_the_plain_way_and_said():
    model = TwoTowers(HungryOnStream(), Trap())
    with stream_cases.colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, _):
        expected = model(*pair_batch())
        model.left.order = "hungry"
        got = model(*pair_batch())
        assert torch.equal(got, expected)
        got.sum().backward()
        assert "1 call of left ran in place" in handle.describe()
        assert "it ran out of memory on its lane, and was run again in the plain way" in handle.describe()
