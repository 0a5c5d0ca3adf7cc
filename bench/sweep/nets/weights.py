"""Tied, shared, parametrized, adapted, frozen and replaced weights; norms, number formats and autocast."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from bench.sweep.device import device
from bench.sweep.nets.pieces import (
    Two,
    alike,
    before_step,
    between,
    loop,
    losses,
    models,
    squared,
    tokens,
    tower,
    towers,
    train,
)
from bench.sweep.session import Session


class Words(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table, self.net = table, tower()

    def forward(self, tokens):
        return self.net(self.table(tokens)).mean(1)


@between(towers=lambda: (Words(nn.Embedding(50, 32)), Words(nn.Embedding(50, 32))), batch=tokens)
def embedding_tied_to_the_output(self, x, y):
    return (self.a(x) + self.b(y)) @ self.a.table.weight.T


def _twice(part):
    return Two(part, part)


def _sharing(layer):
    return Two(tower(layer), tower(layer))


def _tied():
    model = Two()
    model.a[4].weight = nn.Parameter(model.a[0].weight.T.detach().clone())
    model.b[2].bias = model.b[0].bias
    return model


def _normed():
    model = Two()
    parametrizations.weight_norm(model.a[0])
    parametrizations.spectral_norm(model.a[2])
    parametrizations.spectral_norm(model.b[0])
    return model


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def _symmetric():
    model = Two(tower(nn.Linear(32, 32)), tower(nn.Linear(32, 32)))
    for side in (model.a, model.b):
        parametrize.register_parametrization(side[5], "weight", _Symmetric())
    return model


@losses(_symmetric)
def symmetric_weights_cached(session, model, inputs):
    with parametrize.cached():
        return squared(model, inputs)


def _adapted():
    from peft import LoraConfig, get_peft_model  # a machine with a GPU may be without

    return get_peft_model(
        tower(), LoraConfig(target_modules=["0", "4"], r=4, init_lora_weights=False, lora_dropout=0.1)
    )


@between(towers=lambda: (_adapted(), _adapted()))
def adapters_disabled_around_a_call(self, x, y):
    with self.a.disable_adapter():
        reference = self.a(y)
    return self.b(x) - reference


@before_step()
def layer_replaced_in_mid_training(session, model, step):
    if step == 2:
        model.a[2] = nn.Linear(256, 256).to(device())


@between()
def inner_step_of_meta_learning(self, x, y):
    fast = dict(self.a.named_parameters())
    inner = functional_call(self.a, fast, (x,)).square().mean()
    gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
    return functional_call(self.a, fast, (y,)) * self.b(y)


@loop
def autocast_around_the_whole_step(session: Session):
    with torch.autocast(device().type, torch.bfloat16):
        train(session, Two())


@between(setup=lambda model: model.a.bfloat16())
def half_precision_tower_beside_a_float_one(self, x, y):
    return self.a(x.bfloat16()).float() * self.b(y)


@towers(weight=lambda: nn.Parameter(torch.randn(17, 17, dtype=torch.cfloat) / 8), net=tower)
def complex_features(self, x):
    return self.net(torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=32))


@between(towers=lambda: alike(lambda self, x: self.net(x[:, None]), net=lambda: nn.Conv1d(1, 8, 5, padding=2)))
def flags_of_backends_set_around_a_call(self, x, y):
    with torch.backends.mkldnn.flags(enabled=False):
        a = self.a(x)
    return a * self.b(y)


CASES = {
    "one_module_under_two_names": models(lambda: _twice(tower())),
    "layer_shared_by_towers": models(lambda: _sharing(nn.Linear(32, 32))),
    "layers_of_a_tower_tied": models(_tied),
    "weight_norm_and_spectral_norm": models(_normed),
    "spectral_norm_by_hook": models(lambda: Two(tower(nn.utils.spectral_norm(nn.Linear(32, 32))))),
    "adapters_merged_in_mid_training": models(
        lambda: Two(_adapted(), _adapted()),
        before=lambda session, model, step: model.a.merge_adapter() if step == 2 else None,
    ),
}
