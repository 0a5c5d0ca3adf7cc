"""Modules that read or change more than their arguments: attributes, globals, buffers, teachers' weights, settings."""

from __future__ import annotations

import contextvars
import threading

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.sweep.nets.pieces import Scaled, Two, alike, batch, between, losses, models, tower, towers, train
from bench.sweep.session import Session


@between(towers=lambda: (Scaled(), Scaled()))
def attribute_set_around_the_call(self, x, y):
    self.a.scale = 2.0
    a = self.a(x)
    self.a.scale = 1.0
    return a * self.b(y)


class _Own(Scaled):
    scale = 1.0


@between(towers=lambda: (_Own(), _Own()))
def attribute_of_a_class_set_between_modules(self, x, y):
    _Own.scale = float(x.mean())
    a = self.a(x)
    _Own.scale = float(y.mean())
    return a * self.b(y)


def _note_last(self, x):
    result = self.net(x)
    self.last = result.detach().mean()
    return result


@between(towers=lambda: (*alike(_note_last, 1), Scaled()))
def attribute_of_a_tower_read_by_the_other(self, x, y):
    a = self.a(x)
    self.b.scale = self.a.last
    return a * self.b(y)


def _penalise(self, x):
    result = self.net(x)
    self.penalty = result.square().mean()
    return result


@losses(lambda: Two(*alike(_penalise)))
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


_scale = contextvars.ContextVar("scale", default=1.0)


@between(towers=lambda: alike(lambda self, x: self.net(x) * _scale.get()))
def contextvar_around_the_call(self, x, y):
    token = _scale.set(2.0)
    a = self.a(x)
    _scale.reset(token)
    return a * self.b(y)


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


@between(towers=lambda: alike(lambda self, x: self.net(x) + torch.linspace(0, 1, 32, device=x.device).float()))
def default_dtype_changed_around_the_call(self, x, y):
    torch.set_default_dtype(torch.float64)
    a = self.a(x)
    torch.set_default_dtype(torch.float32)
    return a * self.b(y)


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


@between(setup=lambda model: model.b.requires_grad_(False))
def teacher_averaged_before_its_call(self, x, y):
    with torch.no_grad():
        for student, teacher in zip(self.a.parameters(), self.b.parameters(), strict=True):
            teacher.mul_(0.9).add_(student, alpha=0.1)
        target = self.b(y)
    return self.a(x) - target


@between(setup=lambda model: model.b.requires_grad_(False))
def teacher_averaged_after_its_call(self, x, y):
    with torch.no_grad():
        target = self.b(y)
    online = self.a(x)
    for student, teacher in zip(self.a.parameters(), self.b.parameters(), strict=True):
        teacher.data.mul_(0.9).add_(student.data, alpha=0.1)
    return online - target


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


def _reading_the_mean_of_the_other():
    (deep,) = alike(_track, 1, net=lambda: nn.Sequential(tower(), tower(), tower()), mean=lambda: torch.zeros(32))
    model = Two(deep, *alike(lambda self, x: self.net(x) - self.other[0].mean, 1))
    model.b.other = [model.a]
    return model


@towers()
def parameters_clamped_in_forward(self, x):
    for parameter in self.net.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    return self.net(x)


CASES = {"buffer_of_one_tower_read_by_the_other": models(_reading_the_mean_of_the_other)}
