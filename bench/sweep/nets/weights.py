"""Weights and norms: tied, shared, parametrized, normalised, adapted, frozen, replaced."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from bench.sweep.device import device
from bench.sweep.nets.pieces import Two, batch, before_step, between, losses, tokens, tower, train
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


def sparse_embeddings(session: Session):
    model = Two(Words(nn.Embedding(50, 32, sparse=True)), Words(nn.Embedding(50, 32, sparse=True)))
    session.colocate(model, tokens(0))
    tables = [model.a.table.weight, model.b.table.weight]
    others = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = torch.optim.SparseAdam(tables, 1e-3), torch.optim.Adam(others, 1e-3)
    for step in range(4):
        model.zero_grad()
        loss = model(*tokens(step)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        session.note(loss.item())


def one_module_under_two_names(session: Session):
    both = tower()
    train(session, Two(both, both))


@between()
def one_module_called_twice(self, x, y):
    return self.a(x) * self.a(y) + self.b(x)


def layer_shared_by_towers(session: Session):
    layer = nn.Linear(32, 32)
    train(session, Two(tower(layer), tower(layer)))


def layers_of_a_tower_tied(session: Session):
    model = Two()
    model.a[4].weight = nn.Parameter(model.a[0].weight.T.detach().clone())
    model.b[2].bias = model.b[0].bias
    train(session, model)


def weight_norm(session: Session):
    model = Two()
    for layer in (model.a[0], model.b[0]):
        parametrizations.weight_norm(layer)
    train(session, model)


def spectral_norm(session: Session):
    model = Two()
    for layer in (model.a[0], model.a[2], model.b[0]):
        parametrizations.spectral_norm(layer)
    train(session, model)


def spectral_norm_by_hook(session: Session):
    train(session, Two(tower(nn.utils.spectral_norm(nn.Linear(32, 32))), tower()))


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def _symmetric_towers() -> Two:
    model = Two(tower(nn.Linear(32, 32)), tower(nn.Linear(32, 32)))
    for side in (model.a, model.b):
        parametrize.register_parametrization(side[5], "weight", _Symmetric())
    return model


@losses(model=_symmetric_towers)
def symmetric_weights_cached(session, model, inputs):
    with parametrize.cached():
        return model(*inputs).square().mean()


def batch_norm_in_both_towers(session: Session):
    train(session, Two(tower(nn.BatchNorm1d(32)), tower(nn.BatchNorm1d(32, momentum=None))))


def batch_norm_shared_by_towers(session: Session):
    norm = nn.BatchNorm1d(32)
    train(session, Two(tower(norm), tower(norm)))


def _adapted(**settings):
    from peft import LoraConfig, get_peft_model  # a machine with a GPU may be without

    config = LoraConfig(target_modules=["0", "4"], r=4, init_lora_weights=False, **settings)
    return get_peft_model(tower(), config)


def low_rank_adapters(session: Session):
    train(session, Two(_adapted(lora_dropout=0.1), _adapted(lora_dropout=0.1)))


@between(towers=lambda: (_adapted(), _adapted()))
def adapters_disabled_around_a_call(self, x, y):
    with self.a.disable_adapter():
        reference = self.a(y)
    return self.b(x) - reference


def adapters_merged_in_mid_training(session: Session):
    model = Two(_adapted(), _adapted())
    train(session, model, before=lambda step: model.a.merge_adapter() if step == 2 else None)


def layers_frozen_and_thawed(session: Session):
    model = Two()
    train(session, model, before=lambda step: model.a.requires_grad_(step % 2 == 0), steps=5)


def frozen_tower(session: Session):
    model = Two()
    model.b.requires_grad_(False)
    train(session, model)


@before_step()
def tower_replaced_in_mid_training(session, model, step):
    if step == 2:
        model.b = tower().to(device())


@before_step()
def layer_replaced_in_mid_training(session, model, step):
    if step == 2:
        model.a[2] = nn.Linear(256, 256).to(device())


@before_step()
def storage_of_parameters_replaced(session, model, step):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def weights_loaded_in_mid_training(session: Session):
    model = Two().to(device())
    first = copy.deepcopy(model.state_dict())
    train(session, model, before=lambda step: model.load_state_dict(first, assign=step > 2) if step > 1 else None)


@between()
def functional_call_with_changed_weights(self, x, y):
    halved = {name: parameter * 0.5 for name, parameter in self.b.named_parameters()}
    return self.a(x) * functional_call(self.b, halved, (y,))


@between()
def inner_step_of_meta_learning(self, x, y):
    fast = dict(self.a.named_parameters())
    inner = functional_call(self.a, fast, (x,)).square().mean()
    gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
    return functional_call(self.a, fast, (y,)) * self.b(y)


def lazy_layers(session: Session):
    model = Two(tower(nn.LazyLinear(32)), tower(nn.LazyBatchNorm1d())).to(device())
    model(*batch(0))
    train(session, model)
