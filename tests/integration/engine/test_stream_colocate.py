"""``mosaic.colocate`` on streams from end to end: what users see, on a fake device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Record, Trap, TwoTowers, pair_batch
from stream_cases import FakeBackend, run_both

import mosaic
from mosaic.errors import UnsupportedModelError


def towers() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(Trap(), Trap())


def test_a_branch_and_the_whole_model_share_a_step_and_each_other_s_results():
    def loop(model: Any, record: Record) -> None:
        for step in range(3):
            x, y = pair_batch(step)
            other = model.right(y).tanh()[:, :8]
            loss = (model.left(other).T @ model(x, y)).square().mean()
            loss.backward()
            record.note(loss)
            record.note_model(model)

    run_both(towers, pair_batch(), SIDE_BY_SIDE, loop)


def test_graphs_on_the_host_are_refused():
    with pytest.raises(ValueError, match="cuda_graphs=True"):
        mosaic.colocate(towers(), sample=pair_batch(), options=mosaic.Options(cuda_graphs=True))


def test_a_branch_that_is_compiled_with_graphs_of_the_compiler_s_is_refused():
    model = towers()
    model.left.compile(mode="reduce-overhead")
    with pytest.raises(UnsupportedModelError, match=r"'left' is compiled with CUDA graphs .* without a mode"):
        mosaic.colocate(model, sample=pair_batch(), backend=FakeBackend())
