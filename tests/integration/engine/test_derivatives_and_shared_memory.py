"""Forward derivatives and transforms of a model, and writes into results, are as in the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import stream_cases
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, Record, TwoTowers, pair_batch, run_both, train
from torch import nn
from torch.autograd import forward_ad


def slopes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Forward mode."""
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)), y))
        assert made.tangent is not None
        return made.primal.square().mean() + made.tangent.square().mean()


def stepping(loss: Callable[..., torch.Tensor], model: nn.Module, record: Record) -> None:
    """Trains by an odd loss and by a plain one in turns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        found = loss(model, *pair_batch(step)) if step % 2 else model(*pair_batch(step)).square().mean()
        found.backward()
        record.note(found)
        record.note_model(model)
        optimizer.step()
        optimizer.zero_grad()


def per_sample(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradients of each row by functional calls."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def one(named: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, named, (x[None], y[None])).square().mean()

    found = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(named, x, y)
    scale = sum(gradient.square().mean() for gradient in found.values())
    return model(x, y).square().mean() * scale


def penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradients of gradients."""
    loss = model(x.requires_grad_(), y).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().mean()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, at its first forward derivative
@pytest.mark.parametrize(
    ("loss", "on"),
    [*product((slopes, per_sample), ("host", "streams")), (penalty, "streams")],
)
def test_other_derivatives_of_a_model_are_those_of_the_plain_one(loss: Callable[..., torch.Tensor], on: str):
    both = run_both if on == "host" else stream_cases.run_both
    described = both(TwoTowers, pair_batch(), SIDE_BY_SIDE, partial(stepping, loss))
    if on == "host":
        assert "ran in place" in described


@pytest.mark.parametrize(("through", "from_step"), [("a result", 0), ("a view", 0), ("a view", 3)])
def test_a_result_may_be_written_to_and_a_module_runs_in_place_where_views_of_it_are(through: str, from_step: int):
    def forward(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x) * 1, self.right(y)
        first = left[:, 0]
        if through == "a result":
            left = self.left_again(left)
        if self.calls >= from_step:
            left += right
        self.calls += 1
        return left * first.sum() + right

    def make() -> Glued:
        model = Glued(forward)
        model.left_again = nn.Identity() if through == "a view" else Doing(lambda self, x: x * 2)
        model.calls = 0
        return model

    described = run_both(make, pair_batch(), SIDE_BY_SIDE, train(6), include=["left", "right"])
    wanted = "left ran in place" if through == "a view" else "on slot"
    assert wanted in described


@pytest.mark.parametrize("hooked", ["the argument", "the result"])
def test_a_module_that_hooks_gradients_that_it_shares_with_its_caller_runs_in_place(hooked: str):
    def hooking(self: Doing, x: torch.Tensor) -> torch.Tensor:
        made = self.layers(x) + x.repeat(1, 2)
        (x if hooked == "the argument" else made).register_hook(lambda grad: grad * 0.1)
        return made

    def forward(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x * self.scale, y * self.scale
        left, right = self.left(x), self.right(y)
        left.register_hook(lambda grad: grad + 0.01)
        return left * right + x.repeat(1, 2).sin()

    described = run_both(lambda: Glued(forward, Doing(hooking)), pair_batch(), SIDE_BY_SIDE, train(4))
    assert "left ran in place" in described
