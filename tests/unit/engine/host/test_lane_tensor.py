"""Glue works with results that a lane is still computing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, TwoTowers, colocate, pair_batch

from mosaic.errors import ModuleContractError


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
