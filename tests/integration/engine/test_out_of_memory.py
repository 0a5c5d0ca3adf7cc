"""A module for which there is no memory on its stream beside the others runs in place, behind them."""

from __future__ import annotations

import stream_cases
import torch
from engine_cases import SIDE_BY_SIDE, Trap, TwoTowers, pair_batch

from mosaic.engine.calls.thread_state import on_lane


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
        assert "it ran out of memory on its lane, and was run again" in handle.describe()
