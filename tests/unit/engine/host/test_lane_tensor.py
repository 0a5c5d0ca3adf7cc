"""Glue works with results that a lane is still computing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, TwoTowers, colocate, pair_batch
from torch.nn import functional

from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.errors import ModuleContractError, UnsupportedModelError


@pytest.fixture
def pending() -> Any:
    """A model and its two results, still on their lanes."""
    torch.manual_seed(0)
    model = TwoTowers()
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    for step in range(2):
        model(*pair_batch(step))
    x, y = pair_batch()
    yield model, model.left(x), model.right(y)
    handle.remove()


def test_a_result_shows_its_metadata_without_waiting():
    waits, opened = threading.Event(), threading.Event()

    def waiting(self: Doing, x: torch.Tensor) -> torch.Tensor:
        assert not waits.is_set() or opened.wait(60)
        return self.layers(x)

    model = TwoTowers(Doing(waiting))
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        model(*pair_batch())
        waits.set()
        result = model.left(pair_batch()[0])
        assert isinstance(result, LaneTensor)
        assert (result.shape, result.dtype, result.requires_grad, len(result)) == ((6, 16), torch.float32, True, 6)
        glued = functional.normalize(result @ model.weight, dim=-1).mean(0)
        assert isinstance(glued, LaneTensor)
        assert glued.shape == (16,)
        opened.set()
        assert type(glued.join()) is torch.Tensor
    finally:
        opened.set()
        handle.remove()


def test_a_result_joins_to_one_plain_tensor(pending: Any):
    _, left, _ = pending
    assert left.join() is left.join()
    assert type(left.join()) is torch.Tensor


def test_lanes_that_mix_are_joined(pending: Any):
    _, left, right = pending
    assert type(left + 1) is LaneTensor
    assert type(left + right) is torch.Tensor


def test_writing_after_a_view_was_used_elsewhere_is_refused(pending: Any):
    _, left, right = pending
    view = left[:, 0]
    assert type(view + right[:, 0]) is torch.Tensor
    with pytest.raises(UnsupportedModelError, match="written to in place after a view of it was used elsewhere"):
        left.mul_(2)


def test_writing_to_an_input_before_the_lane_has_read_it_is_an_error():
    opened = threading.Event()
    model = TwoTowers()
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        model(*pair_batch())
        lane = handle._executor.lanes.lane((0,))
        lane.submit(lambda: opened.wait(60))
        x = pair_batch()[0]
        result = model.left(x)
        mask = torch.ones(6, 16)
        glued = model.left(pair_batch()[0]) * mask
        x.zero_()
        mask.zero_()
        opened.set()
        with pytest.raises(ModuleContractError, match="an input of 'left' was written to"):
            result.join()
        with pytest.raises(ModuleContractError, match="written to before the lane had read it"):
            glued.join()
    finally:
        opened.set()
        handle.remove()


def test_a_module_that_reads_a_lane_s_result_behind_its_arguments_is_an_error():
    store: dict[str, torch.Tensor] = {}

    def behind(self: Doing, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + (store["left"].detach() if store else 0)

    model = TwoTowers(right=Doing(behind))
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        model(*pair_batch())
        x, y = pair_batch()
        store["left"] = model.left(x)
        with pytest.raises(ModuleContractError, match="reads a result of 'left' that is not among its arguments"):
            model.right(y).join()
    finally:
        handle.remove()
