"""``mosaic.colocate`` on streams from end to end: what users see, on a fake device."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Record, Trap, TwoTowers, assert_same, pair_batch, train
from stream_cases import FakeBackend, colocated, run_both

import mosaic
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.tensor import StreamTensor
from mosaic.errors import BackendUnavailableError


def towers() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(Trap(), Trap())


def test_a_backend_of_streams_gets_an_executor_of_streams():
    with colocated(towers(), pair_batch(), SIDE_BY_SIDE) as (handle, _):
        assert isinstance(handle._executor, StreamExecutor)
        assert handle.active


def test_a_model_elsewhere_than_the_backend_is_refused():
    with pytest.raises(BackendUnavailableError, match="is on meta"):
        mosaic.colocate(towers().to("meta"), sample=pair_batch(), backend=FakeBackend())


def test_the_model_returns_plain_tensors_and_its_branches_tagged_ones():
    model = towers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        assert type(model(*pair_batch())) is torch.Tensor
        assert type(model.left(pair_batch()[0])) is StreamTensor


def test_disabled_runs_the_plain_model_and_remove_gives_it_back():
    model = towers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, _):
        expected = model(*pair_batch())
        kept = model.left(pair_batch()[0])
        spans = len(handle.timeline().spans)
        with handle.disabled():
            assert type(model.left(pair_batch()[0])) is torch.Tensor
            assert torch.equal(model(*pair_batch()), expected)
        assert len(handle.timeline().spans) == spans
        handle.remove()
        handle.remove()
        assert type(model.left) is Trap
        assert torch.equal(model(*pair_batch()), expected)
        assert torch.equal(kept, model.left(pair_batch()[0]))
        (kept * 2).sum().backward()
        assert type(model.left.layers[0].weight.grad) is torch.Tensor


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_a_copy_is_plain(way: str):
    model = towers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        model(*pair_batch()).sum().backward()
        twin: Any
        if way == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert type(twin.left) is Trap
        assert list(twin.state_dict()) == list(model.state_dict())
        assert torch.equal(twin(*pair_batch()), model(*pair_batch()))


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
    with pytest.raises(ValueError, match="graphs=True"):
        mosaic.colocate(towers(), sample=pair_batch(), graphs=True)


def test_a_word_for_graphs_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="graphs='always'; use True, False or 'auto'"):
        mosaic.colocate(towers(), sample=pair_batch(), backend=FakeBackend(), graphs="always")  # type: ignore[arg-type]


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
