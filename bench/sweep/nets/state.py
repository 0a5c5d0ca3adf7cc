"""Modules that read more than their arguments, or keep values for later."""

from __future__ import annotations

import contextvars
import threading

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.sweep.nets.pieces import Scaled, Two, alike, batch, between, losses, part, tower, towers, train
from bench.sweep.session import Session


@between(towers=lambda: (Scaled(), Scaled()))
def attribute_set_around_the_call(self, x, y):
    self.a.scale = 2.0
    a = self.a(x)
    self.a.scale = 1.0
    return a * self.b(y)


def attribute_scheduled_by_the_loop(session: Session):
    model = Two(Scaled(), Scaled())
    train(session, model, before=lambda step: setattr(model.a, "scale", 1.0 / (step + 1)))


class _Own(Scaled):
    scale = 1.0


@between(towers=lambda: (_Own(), _Own()))
def attribute_of_a_class_set_between_modules(self, x, y):
    _Own.scale = float(x.mean())
    a = self.a(x)
    _Own.scale = float(y.mean())
    return a * self.b(y)


def _note_last(self, x):
    made = self.net(x)
    self.last = made.detach().mean()
    return made


@between(towers=lambda: (part(_note_last), Scaled()))
def attribute_of_a_tower_read_by_the_other(self, x, y):
    a = self.a(x)
    self.b.scale = self.a.last
    return a * self.b(y)


def _collect(self, x):
    made = self.net(x)
    self.kept.append(made)
    return made


@between(towers=lambda: alike(_collect))
def results_collected_in_a_list(self, x, y):
    self.a.kept, self.b.kept = [], []
    product = self.a(x) * self.b(y)
    return product + sum(self.a.kept) - sum(self.b.kept)


def _penalise(self, x):
    made = self.net(x)
    self.penalty = made.square().mean()
    return made


@losses(model=lambda: Two(*alike(_penalise)))
def loss_of_a_part_kept_as_an_attribute(session, model, inputs):
    return model(*inputs).square().mean() + 0.1 * (model.a.penalty + model.b.penalty)


_shared = {"scale": 1.0}


@between(towers=lambda: alike(lambda self, x: self.net(x) * _shared["scale"]))
def dictionary_shared_by_towers(self, x, y):
    _shared["scale"] = 3.0
    a = self.a(x)
    _shared["scale"] = 0.5
    return a * self.b(y)


def closure_counts_calls(session: Session):
    calls = 0

    class Counting(Scaled):
        def forward(self, x):
            nonlocal calls
            calls += 1
            return super().forward(x) * calls

    train(session, Two(Counting(), Counting()))


@towers(after=lambda session, model, step: session.note(model.a.calls, model.b.calls), net=tower, calls=0)
def counter_warms_a_tower_up(self, x):
    self.calls += 1
    return self.net(x) * min(1.0, self.calls / 3)


_scale = contextvars.ContextVar("scale", default=1.0)


@between(towers=lambda: alike(lambda self, x: self.net(x) * _scale.get()))
def contextvar_around_the_call(self, x, y):
    token = _scale.set(2.0)
    a = self.a(x)
    _scale.reset(token)
    return a * self.b(y)


def contextvar_set_once(session: Session):
    scale = contextvars.ContextVar("scale", default=1.0)
    scale.set(2.0)
    train(session, Two(*alike(lambda self, x: self.net(x) * scale.get())))


def thread_local_state(session: Session):
    local = threading.local()
    local.scale = 2.0
    train(session, Two(*alike(lambda self, x: self.net(x) * getattr(local, "scale", 1.0))))


def _attend(self, x):
    q = self.net(x).view(1, 4, -1, 8)
    return functional.scaled_dot_product_attention(q, q, q).reshape(-1, 32)


@between(towers=lambda: alike(_attend))
def attention_kernel_chosen_around_the_call(self, x, y):
    with sdpa_kernel(SDPBackend.MATH):
        a = self.a(x)
    return a * self.b(y)


@between(
    towers=lambda: alike(lambda self, x: self.net(x) + torch.linspace(0, 1, 32, device=x.device).float()),
)
def default_dtype_changed_around_the_call(self, x, y):
    torch.set_default_dtype(torch.float64)
    a = self.a(x)
    torch.set_default_dtype(torch.float32)
    return a * self.b(y)


@towers(net=tower, cache=dict, batch=lambda step: batch(step, 16 * (1 + step % 2)), steps=6)
def cache_of_results_by_length(self, x):
    made = self.cache.get(len(x))
    if made is None:
        made = self.cache[len(x)] = torch.randn(len(x), 32, device=x.device)
    return self.net(x) + made


@towers(net=tower, seen=lambda: np.zeros(8))
def numpy_array_as_state(self, x):
    made = self.net(x)
    self.seen += np.histogram(made.detach().cpu().numpy(), bins=8, range=(-1, 1))[0]
    return made * float(self.seen.std())


@towers(lstm=lambda: nn.LSTM(32, 32), state=None)
def state_of_an_lstm_carried_over(self, x):
    made, state = self.lstm(x[:, None], self.state)
    self.state = tuple(part.detach() for part in state)
    return made[:, 0]
