"""Glue works with results that a lane is still computing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, TwoTowers, colocate, pair_batch
from torch.nn import functional

from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.errors import ModuleContractError, UnforeseenError


@pytest.fixture
def pending() -> Any:
    """A model and its two results, still on their lanes."""
    torch.manual_seed(0)
    model = TwoTowers()
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    for step in range(2):
        model(*pair_batch(step))
    x, y = pair_batch()
    handle._executor.begin()  # as in a call of the whole model; outside of it results are waited for
    yield model, model.left(x), model.right(y)
    handle._executor.end()
    handle.remove()


def test_a_result_shows_its_metadata_without_waiting():
    waits, opened = threading.Event(), threading.Event()

    def waiting(self: Doing, x: torch.Tensor) -> torch.Tensor:
        assert not waits.is_set() or opened.wait(60)
        return self.layers(x)

    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = model.left(x)
        glued = functional.normalize(result @ model.weight, dim=-1).mean(0)
        if waits.is_set():
            assert isinstance(result, LaneTensor)
            assert (result.shape, result.dtype, result.requires_grad, len(result)) == ((6, 16), torch.float32, True, 6)
            assert isinstance(glued, LaneTensor)
            assert glued.shape == (16,)
            opened.set()
        return glued + model.right(y)

    model = Glued(glue, Doing(waiting))
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        model(*pair_batch())
        waits.set()
        assert type(model(*pair_batch())) is torch.Tensor
    finally:
        opened.set()
        handle.remove()


@pytest.mark.parametrize("function", [torch.prod, torch.linalg.svdvals, torch.conj, torch.linalg.norm])
def test_a_function_that_is_not_listed_waits_and_runs_on_plain_tensors(pending: Any, function: Any):
    _, left, _ = pending
    assert type(function(left)) is torch.Tensor


def test_a_product_of_a_vector_has_the_shape_of_the_plain_one(pending: Any):
    model, left, _ = pending
    product = model.weight[0] @ left.T
    assert type(product) is LaneTensor
    assert product.shape == (6,)


def test_a_result_joins_to_one_plain_tensor(pending: Any):
    _, left, _ = pending
    assert left.join() is left.join()
    assert type(left.join()) is torch.Tensor


def test_lanes_that_mix_are_joined(pending: Any):
    _, left, right = pending
    assert type(left + 1) is LaneTensor
    assert type(left + right) is torch.Tensor


def test_writing_into_a_result_that_shares_its_memory_is_refused(pending: Any):
    _, left, right = pending
    view = left[:, 0]
    assert type(view + right[:, 0]) is torch.Tensor
    with pytest.raises(UnforeseenError, match=r"'left', called at .* is written to in place, and another tensor has"):
        left.mul_(2)


@pytest.mark.parametrize("through", ["a module", "glue"])
def test_writing_to_an_input_before_the_lane_has_read_it_is_an_error(through: str):
    opened, written = threading.Event(), torch.ones(6, 16)
    held: list[Any] = []

    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for lane in held:
            lane.submit(lambda: opened.wait(60))
        result = model.left(x) * (written if through == "glue" else 1)
        if held:
            (written if through == "glue" else x).zero_()
            opened.set()
        return result + model.right(y)

    model = Glued(glue)
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        model(*pair_batch())
        held.append(handle._executor.lanes.lane((0,)))
        with pytest.raises(ModuleContractError, match=r"written to"):
            model(*pair_batch())
    finally:
        opened.set()
        handle.remove()


@pytest.mark.parametrize("grad", [False, True])
def test_a_module_that_the_loop_calls_has_read_its_inputs_and_weights_when_it_returns(grad: bool):
    model = TwoTowers()
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        model(*pair_batch())
        x, weights = pair_batch()[0], {name: value.clone() for name, value in model.left.state_dict().items()}
        with torch.set_grad_enabled(grad):
            results = []
            for step in range(4):
                x.fill_(step)
                results.append((model.left(x), x.clone()))
                for parameter in model.left.parameters():
                    parameter.data.add_(1.0)
                model.left.load_state_dict({name: value.clone() for name, value in weights.items()}, assign=True)
            assert all(type(result) is torch.Tensor for result, _ in results)
        handle.remove()
        with torch.no_grad():
            assert all(torch.equal(model.left(x), result) for result, x in results)
    finally:
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
        handle._executor.begin()
        store["left"] = model.left(x)
        with pytest.raises(ModuleContractError, match="reads a result of 'left' that is not among its arguments"):
            model.right(y).join()
        handle._executor.end()
    finally:
        handle.remove()
