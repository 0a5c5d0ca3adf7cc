"""``mosaic.colocate`` on streams from end to end: what users see, on a fake device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Record, Trap, TwoTowers, assert_same, pair_batch, train
from stream_cases import FakeBackend, colocated, run_both

import mosaic
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.errors import UnsupportedModelError


def towers() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(Trap(), Trap())


@pytest.mark.parametrize("order", ["fail", "interrupt", "backward"])
def test_an_error_reaches_the_caller_and_training_goes_on_as_in_the_plain_loop(order: str):
    def loop(model: Any, record: Record) -> None:
        train(2)(model, record)
        model.left.order = order
        with pytest.raises((ValueError, KeyboardInterrupt)):
            model(*pair_batch(9)).sum().backward()
        model.left.order = "work"
        model.zero_grad()
        train(2)(model, record)

    run_both(towers, pair_batch(), SIDE_BY_SIDE, loop)


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


@pytest.mark.parametrize("in_place", [True, False])
def test_a_branch_that_is_compiled_with_graphs_of_the_compiler_s_is_refused(in_place: bool):
    model = towers()
    if in_place:
        model.left.compile(mode="reduce-overhead")
    else:
        model.left = torch.compile(model.left, mode="max-autotune")
    with pytest.raises(UnsupportedModelError, match=r"'left' is compiled with CUDA graphs .* without a mode"):
        mosaic.colocate(model, sample=pair_batch(), backend=FakeBackend())


def test_with_graphs_training_is_equal_too():
    plain, ours, loop = Record(), Record(), train(5, torch.optim.SGD)
    model = towers()
    torch.manual_seed(1)
    loop(copy.deepcopy(model), plain)
    with colocated(model, pair_batch(), SIDE_BY_SIDE, graphs=True) as (handle, _):
        torch.manual_seed(1)
        loop(model, ours)
        executor = handle._executor
        assert isinstance(executor, StreamExecutor)
        assert executor.graphs is not None
        assert executor.graphs.num_replays > 0
    assert_same(plain, ours)
