"""Gradients of weights that wait: the same as those that do not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from mosaic.parts.strategies import STRATEGIES, run_layer
from mosaic.ranks.pipeline.chunk_work import LateWeights


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
    late.backward([output.square().sum()])
    assert model[0].weight.grad is None
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    late.run()
    late.run()  # nothing is due twice
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
        assert not own.grad.requires_grad  # else it would keep the forward's activations


def test_matrices_whose_gradients_hooks_wait_for_have_them_in_backward():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    layers[0].weight.register_hook(lambda gradient: 2 * gradient)
    layers[1].weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", -weight.grad))
    late, given = LateWeights(), torch.randn(2, 4)
    plain = torch.autograd.grad(sum(layer(given).sum() for layer in layers), [layer.weight for layer in layers])
    with late.collecting():
        output = sum(layer(given).sum() for layer in layers)
    late.backward([output])
    assert layers[2].weight.grad is None
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
    late.backward([output.sum()])
    late.run()
    assert model.weight.grad.dtype is torch.float32
    assert model.bias.grad.dtype is torch.float32


def gradient_within(layer: nn.Linear, given: torch.Tensor) -> torch.Tensor:
    (force,) = torch.autograd.grad(layer(given).tanh().sum(), given, create_graph=True)
    return given - 0.1 * force


def gradient_of_the_weight_within(layer: nn.Linear, given: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(layer(given).square().sum(), layer.weight, create_graph=True)
    return given @ found


def tangent_within(layer: nn.Linear, given: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(given, given.cos())).tanh()).tangent


LAYERS: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "a gradient of its input": gradient_within,
    "a gradient of its weight": gradient_of_the_weight_within,
    "a backward of its own": lambda layer, given: (layer(given).sum().backward(retain_graph=True), layer(given))[1],
    "an operation in place": lambda layer, given: layer(given).sin_().relu_(),
    "a checkpoint": lambda layer, given: checkpoint(layer, given, use_reentrant=False).tanh(),
    "a reentrant checkpoint": lambda layer, given: checkpoint(layer, given, use_reentrant=True).tanh(),
    "a gradient in a checkpoint": lambda layer, given: checkpoint(gradient_within, layer, given, use_reentrant=False),
    "vmap": lambda layer, given: torch.func.vmap(lambda row: layer(row).tanh())(given),
    "grad": lambda layer, given: torch.func.grad(lambda one: layer(one).tanh().sum())(given),
    "jvp": lambda layer, given: torch.func.jvp(lambda one: layer(one).tanh(), (given,), (given.cos(),))[1],
    "forward derivatives": tangent_within,
    "one vector": lambda layer, given: layer(given[0, 0]) + layer(given[0]).sum(0),
    "no rows": lambda layer, given: torch.cat([layer(given[:0]), layer(given)]),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, in its forward derivatives
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, one) for name in LAYERS for one in STRATEGIES if (name, one) != ("grad", "recompute")],  # torch refuses it
)
def test_layers_that_differentiate_or_write_in_place_have_the_plain_gradients(name: str, strategy: str):
    torch.manual_seed(0)
    layer, given = nn.Linear(4, 4).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    plain, late = copy.deepcopy(layer), LateWeights()
    inputs = [given.clone().requires_grad_() for _ in range(2)]
    with late.collecting():
        output = run_layer(strategy, LAYERS[name], (layer, inputs[0]), {}, late.collecting)
    late.backward([output.square().sum()])
    late.run()
    run_layer(strategy, LAYERS[name], (plain, inputs[1]), {}).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for own, other in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_weights_of_a_layer_that_is_made_again_have_their_gradients_later():
    layer, late = nn.Linear(4, 4), LateWeights()
    with late.collecting():
        output = run_layer("recompute", layer, (torch.randn(2, 4),), {}, late.collecting)
    late.backward([output.sum()])
    assert layer.weight.grad is None
    late.run()
    assert layer.weight.grad is not None
