"""``with mosaic.parallel() as p``: the explicit form, on the host and on streams."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_cases import Explicit, assert_same, explicit_steps, pair_batch, tower
from graph_cases import one_thread  # noqa: F401
from stream_cases import FakeBackend
from torch import nn

import mosaic
from mosaic.engine.parallel import _block
from mosaic.errors import InvalidPlanError


@pytest.mark.parametrize("quotas", [None, {"left": 1, "right": 1}], ids=["by turns", "by quota"])
def test_a_block_computes_what_the_plain_code_does(quotas: dict[str, int] | None):
    torch.manual_seed(0)
    model = Explicit()
    twin = copy.deepcopy(model)
    assert_same(explicit_steps(twin), explicit_steps(model, "run", quotas))


def test_an_error_is_raised_in_the_block_at_the_latest():
    orders = ["work"]

    def work(x: torch.Tensor) -> torch.Tensor:
        if orders[-1] == "fail":
            raise ValueError("no")
        return x + 1

    for _ in range(2):
        with mosaic.parallel() as p:
            p.run("failing", work, torch.ones(3))
    orders.append("fail")
    with pytest.raises(ValueError, match="no"), mosaic.parallel() as p:  # noqa: PT012
        kept = p.run("failing", work, torch.ones(3))
        assert kept.shape == (3,)
    orders.append("work")
    with mosaic.parallel() as p:
        kept = p.run("failing", work, torch.ones(3))
    assert torch.equal(kept + 0, torch.full((3,), 2.0))


def test_names_that_share_a_parameter_run_in_place_with_right_gradients():
    shared = tower()
    gradients: list[Any] = []
    for plain in (True, False):
        shared.zero_grad()
        for step in range(3):
            x, y = pair_batch(step)
            if plain:
                loss = (shared(x) * shared(y)).sum()
            else:
                with mosaic.parallel() as p:
                    loss = (p.run("one", shared, x) * p.run("other", shared, y)).sum()
            loss.backward()
        gradients.append([parameter.grad.clone() for parameter in shared.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


pytestmark = pytest.mark.usefixtures("one_thread")

QUOTAS = {"left": 2, "right": 1}


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    made = FakeBackend(4)
    with made.api.watching():
        yield made
    _block.cache_clear()


def test_a_block_on_streams_computes_what_the_plain_code_does(backend: FakeBackend):
    model = Explicit()
    twin = copy.deepcopy(model)
    expected = explicit_steps(twin)
    assert_same(expected, explicit_steps(model, "run", QUOTAS, backend=backend))
    assert not mosaic.parallel(QUOTAS, backend=backend).executor.in_place


def test_a_block_on_streams_needs_quotas(backend: FakeBackend):
    with pytest.raises(InvalidPlanError, match="a block on a fake device needs a plan or quotas"):
        mosaic.parallel(backend=backend)
    with (
        mosaic.parallel(QUOTAS, backend=backend) as p,
        pytest.raises(InvalidPlanError, match="'other' is not in the plan"),
    ):
        p.run("other", torch.sin, torch.ones(3))


# Pieces that share a module.


class Normed(nn.Module):
    """One encoder with running statistics for both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = tower(8, 16, nn.BatchNorm1d(16))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


def averaged(encoder: nn.Sequential, y: torch.Tensor) -> torch.Tensor:
    for parameter in encoder.parameters():
        parameter.data.mul_(0.9)
    return y.mean()


BETWEEN: dict[str, Any] = {
    "a piece of it": None,
    "the module is called": lambda encoder, y: encoder(y),
    "a layer is called": lambda encoder, y: encoder[0](y),
    "a layer with statistics is called": lambda encoder, y: encoder[2](y.repeat(1, 2)),
    "a weight is used": lambda encoder, y: nn.functional.linear(y, encoder[0].weight),
    "a buffer is read": lambda encoder, _: encoder[2].running_mean * 2,
    "weights are written past torch's count": averaged,
}


@pytest.mark.parametrize("kind", ["module", "method", "function"])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_a_piece_uses_may_be_used_by_others(backend: FakeBackend, between: str, kind: str):
    model = Normed()
    twin, use = copy.deepcopy(model), BETWEEN[between]
    piece = {"module": model.encoder, "method": model.encode, "function": lambda x: model.encoder(x)}[kind]
    for step in range(2):
        x, y = pair_batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            with mosaic.parallel(QUOTAS, backend=backend) as p:
                left = p.run("left", piece, x)
                right = use(model.encoder, y) if use else p.run("right", model.encode, y)
            plain = twin.encode(x), use(twin.encoder, y) if use else twin.encode(y)
        assert all(map(torch.equal, (left + 0, right + 0), plain))
        if use is None:
            (left + right).float().sum().backward()
            sum(plain).float().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert use or torch.equal(ours.grad, theirs.grad)
    assert all(map(torch.equal, model.buffers(), twin.buffers()))


def test_a_backend_may_be_named():
    with mosaic.parallel(backend="host") as p:
        doubled = p.run("left", torch.add, torch.ones(3), 1)
    assert doubled.tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="toaster"):
        mosaic.parallel(backend="toaster")
    with pytest.raises(TypeError, match="plan=3 is a int; pass a plan, or slots such as"):
        mosaic.parallel(3)  # type: ignore[arg-type]
