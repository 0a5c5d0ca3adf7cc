"""Gradients of weights that wait: the same as those that do not."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mosaic.ranks.pipeline.late_weights import LateWeights


@pytest.mark.parametrize("bias", [True, False])
def test_late_gradients_equal_those_of_one_backward_bit_for_bit(bias: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=bias), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5, bias=bias))
    plain, given = copy.deepcopy(model), torch.randn(3, 4, 6)
    inputs = [given.clone().requires_grad_() for _ in range(2)]
    late = LateWeights()
    with late.collecting():
        output = model(inputs[0])
    plain(inputs[1]).square().sum().backward()
    output.square().sum().backward()
    assert model[0].weight.grad is None
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    late.run()
    late.run()  # nothing is due twice
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
        assert not own.grad.requires_grad  # else it would keep the forward's activations


def test_frozen_weights_and_products_without_gradients_are_left_alone():
    frozen = nn.Linear(4, 4).requires_grad_(False)
    late = LateWeights()
    given = torch.randn(2, 4, requires_grad=True)
    with late.collecting():
        frozen(given).sum().backward()
        with torch.no_grad():
            nn.Linear(4, 4)(given)
    late.run()
    assert given.grad is not None
    assert frozen.weight.grad is None


def test_matrices_whose_gradients_hooks_wait_for_have_them_in_backward():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    layers[0].weight.register_hook(lambda gradient: 2 * gradient)
    layers[1].weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", -weight.grad))
    late, given = LateWeights(), torch.randn(2, 4)
    plain = torch.autograd.grad(sum(layer(given).sum() for layer in layers), [layer.weight for layer in layers])
    with late.collecting():
        sum(layer(given).sum() for layer in layers).backward()
    late.run()
    assert torch.equal(layers[0].weight.grad, plain[0])
    assert torch.equal(layers[1].weight.grad, -plain[1])
    assert torch.equal(layers[2].weight.grad, plain[2])


def test_weights_have_their_own_type_under_autocast():
    model = nn.Linear(4, 4)
    late = LateWeights()
    with torch.autocast("cpu", torch.bfloat16), late.collecting():
        output = model(torch.randn(2, 4))
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    late.run()
    assert model.weight.grad.dtype is torch.float32
    assert model.bias.grad.dtype is torch.float32


def test_weights_of_a_layer_that_is_made_again_have_their_gradients():
    layer, given = nn.Linear(4, 4), torch.randn(3, 4)
    plain = copy.deepcopy(layer)
    late = LateWeights()
    with late.collecting():
        output = checkpoint(
            layer, given, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), late.collecting())
        )
    output.square().sum().backward()
    plain(given).square().sum().backward()
    late.run()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
