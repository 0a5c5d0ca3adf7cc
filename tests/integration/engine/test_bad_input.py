"""Bad input in a colocated loop: what comes out is what the plain loop gives, or an error that says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import (
    SIDE_BY_SIDE,
    Record,
    Trap,
    TwoTowers,
    pair_batch,
    run_both,
    tower,
)
from stream_cases import colocated
from torch import nn

from mosaic.engine.calls.thread_state import on_lane


def append(model: TwoTowers) -> None:
    model.left.append(nn.Linear(16, 16))


def replace(model: TwoTowers) -> None:
    model.left = tower()


def widen(model: TwoTowers) -> None:
    model.double()
    model.register_forward_pre_hook(lambda _, args: tuple(x.double() for x in args))


@pytest.mark.parametrize("change", [append, replace, widen])
def test_a_model_that_is_changed_afterwards_computes_what_the_changed_plain_model_computes(
    change: Callable[[TwoTowers], None],
):
    def loop(model: Any, record: Record) -> None:
        for step in range(6):
            if step == 3:
                torch.manual_seed(3)
                change(model)
            loss = model(*pair_batch(step)).square().mean()
            loss.backward()
            record.note(loss)
            record.note_model(model)
            model.zero_grad()

    described = run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop)
    assert (change is widen) == ("ran in place" in described)


class Hungry(Trap):
    """Needs more memory than there is while another module runs beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order == "hungry" and on_lane():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().forward(x)


def test_a_module_without_memory_on_its_stream_is_run_again_in_the_plain_way_and_said():
    model = TwoTowers(Hungry(), Trap())
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, _):
        expected = model(*pair_batch())
        model.left.order = "hungry"
        got = model(*pair_batch())
        assert torch.equal(got, expected)
        got.sum().backward()
        assert "1 call of left ran in place" in handle.describe()
        assert "it ran out of memory on its lane, and was run again in the plain way" in handle.describe()
