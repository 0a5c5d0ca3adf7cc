"""Modules that read or change other state than their arguments; random numbers and hooks."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bench.sweep.device import device
from bench.sweep.nets.pieces import Two, alike, batch, between, models, squared, tower, towers, train
from bench.sweep.session import Session


@towers(net=tower, cache=dict, batch=lambda step: batch(step, 16 * (1 + step % 2)), steps=6)
def cache_of_results_by_length(self, x):
    if len(x) not in self.cache:
        self.cache[len(x)] = torch.randn(len(x), 32, device=x.device)
    return self.net(x) + self.cache[len(x)]


@towers(net=tower, seen=lambda: np.zeros(8))
def numpy_array_as_state(self, x):
    result = self.net(x)
    self.seen += np.histogram(result.detach().cpu().numpy(), bins=8, range=(-1, 1))[0]
    return result * float(self.seen.std())


@towers(lstm=lambda: nn.LSTM(32, 32), state=None)
def state_of_an_lstm_carried_over(self, x):
    result, state = self.lstm(x[:, None], self.state)
    self.state = tuple(part.detach() for part in state)
    return result[:, 0]


@between(queue=lambda: torch.randn(32, 256), place=0)
def queue_of_negatives(self, x, y):
    q, k = functional.normalize(self.a(x), dim=1), functional.normalize(self.b(y), dim=1)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1)
    self.queue[:, self.place : self.place + len(k)] = k.detach().T
    self.place = (self.place + len(k)) % 256
    return logits


@between(
    towers=lambda: alike(lambda self, x: self.net(x) - self.center, net=tower, center=lambda: torch.zeros(32)),
)
def center_of_a_teacher(self, x, y):
    a, b = self.a(x), self.b(y)
    self.b.center.mul_(0.9).add_(b.detach().mean(0), alpha=0.1)
    return functional.cross_entropy(a, b.detach().softmax(-1))


def _track(self, x):
    result = self.net(x)
    self.mean.mul_(0.9).add_(result.detach().mean(0), alpha=0.1)
    return result


@between(towers=lambda: alike(_track, net=tower, mean=lambda: torch.zeros(32)))
def running_mean_read_between_modules(self, x, y):
    a, b = self.a(x), self.b(y)
    return a * b + (self.a.mean - self.b.mean).square().sum()


@towers()
def parameters_clamped_in_forward(self, x):
    for parameter in self.net.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    return self.net(x)


def _drop_layers(self, x):
    for layer in self.layers:
        if not self.training or torch.rand([], device=device()).item() > 0.3:
            x = layer(x).tanh()
    return x


def _seeded(self, x):
    torch.manual_seed(2)
    return self.net(x)


@between(towers=lambda: (tower(nn.Dropout(0.2)), tower(nn.Dropout(0.2))))
def forked_random_numbers(self, x, y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        a = self.a(x)
    return a * self.b(y)


def hook_keeps_a_detached_feature(session: Session):
    model, features = Two(), []
    for layer in (model.a[2], model.b[2]):
        layer.register_forward_hook(lambda module, inputs, result: features.append(result.detach().mean()))
    train(session, model)
    session.note(*features[-4:])


def hooks_change_inputs_and_results(session: Session):
    model = Two()
    model.a.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    model.a.register_forward_hook(lambda module, inputs, result: result * 2)
    model.b[0].register_forward_hook(lambda module, inputs, result: result.tanh())
    train(session, model)


def full_backward_hook_scales_gradients(session: Session):
    model = Two()
    model.a[2].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))
    model.b.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 2,))
    train(session, model)


def hook_added_in_mid_training(session: Session):
    model, features = Two(), []

    def add(session, model, step):
        if step == 2:
            model.b[4].register_forward_hook(lambda module, inputs, result: features.append(result) or result * 2)

    def loss(session, model, inputs):
        return squared(model, inputs) + sum(feature.mean() for feature in features[-1:])

    train(session, model, before=add, loss=loss)


@between(after=lambda session, model, step: session.note(model.result.grad))
def gradient_kept_of_a_tower_result(self, x, y):
    self.result = self.a(x)
    self.result.retain_grad()
    return self.result * self.b(y)


def hook_for_all_modules(session: Session):
    seen = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, result: seen.append(type(module).__name__)
    )
    try:
        train(session, Two())
    finally:
        hook.remove()
    session.note(sorted(seen[-13:]))  # of the last step: lanes call its modules in an order of their own


CASES = {
    "layers_dropped_by_torch": towers(steps=6, layers=lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(6)))(
        _drop_layers
    ),
    "seed_set_in_forward": models(lambda: Two(*alike(_seeded, net=lambda: tower(nn.Dropout(0.2))))),
}
