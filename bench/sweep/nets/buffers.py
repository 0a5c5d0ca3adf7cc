"""Buffers and teachers that change in the forward: averages, queues, centers, statistics."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn
from torch.nn import functional

from bench.sweep.nets.pieces import Two, alike, between, part, tower, towers, train
from bench.sweep.session import Session


@between(setup=lambda model: model.b.requires_grad_(False))
def teacher_averaged_before_its_call(self, x, y):
    with torch.no_grad():
        for mine, theirs in zip(self.a.parameters(), self.b.parameters(), strict=True):
            theirs.mul_(0.9).add_(mine, alpha=0.1)
        target = self.b(y)
    return self.a(x) - target


@between(setup=lambda model: model.b.requires_grad_(False))
def teacher_averaged_after_its_call(self, x, y):
    with torch.no_grad():
        target = self.b(y)
    online = self.a(x)
    for mine, theirs in zip(self.a.parameters(), self.b.parameters(), strict=True):
        theirs.data.mul_(0.9).add_(mine.data, alpha=0.1)
    return online - target


@between(queue=lambda: torch.randn(32, 256), place=0)
def queue_of_negatives(self, x, y):
    q, k = functional.normalize(self.a(x), dim=1), functional.normalize(self.b(y), dim=1)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1)
    self.queue[:, self.place : self.place + len(k)] = k.detach().T
    self.place = (self.place + len(k)) % 256
    return logits


@between(steps=5, old=None)
def queue_kept_in_a_deque(self, x, y):
    self.old = self.old or deque(maxlen=3)
    a, b = self.a(x), self.b(y)
    self.old.append(b.detach())
    return a @ torch.cat(list(self.old)).T


def _centered(self, x):
    return self.net(x) - self.center


@between(towers=lambda: alike(_centered, net=tower, center=lambda: torch.zeros(32)))
def center_of_a_teacher(self, x, y):
    a, b = self.a(x), self.b(y)
    self.b.center.mul_(0.9).add_(b.detach().mean(0), alpha=0.1)
    return functional.cross_entropy(a, b.detach().softmax(-1))


@between(towers=lambda: alike(lambda self, x: self.net(x) + self.center, net=tower, center=lambda: torch.ones(32)))
def buffer_written_before_the_backward(self, x, y):
    a, b = self.a(x), self.b(y)
    self.a.center.mul_(0.5).add_(x.mean(0))
    return a * b


def _track(self, x):
    made = self.net(x)
    self.mean.mul_(0.9).add_(made.detach().mean(0), alpha=0.1)
    return made


@between(towers=lambda: alike(_track, net=tower, mean=lambda: torch.zeros(32)))
def running_mean_read_between_modules(self, x, y):
    a, b = self.a(x), self.b(y)
    return a * b + (self.a.mean - self.b.mean).square().sum()


@towers(net=tower, mean=lambda: torch.zeros(32))
def buffer_replaced_in_forward(self, x):
    made = self.net(x)
    self.mean = 0.9 * self.mean + 0.1 * made.detach().mean(0)
    return made - self.mean


def buffer_of_one_tower_read_by_the_other(session: Session):
    def copy_mean(self, x):
        made = self.net(x)
        self.mean.copy_(made.detach().mean(0))
        return made

    deep = part(copy_mean, net=lambda: nn.Sequential(tower(), tower(), tower()), mean=lambda: torch.zeros(32))
    model = Two(deep, part(lambda self, x: self.net(x) - self.other[0].mean))
    model.b.other = [model.a]
    train(session, model)


def parameter_of_one_tower_read_by_the_other(session: Session):
    model = Two(b=part(lambda self, x: functional.gelu(self.net(x) @ self.other[0].weight)[:, :32]))
    model.b.other = [model.a[-1]]
    train(session, model)


@towers()
def parameters_clamped_in_forward(self, x):
    for parameter in self.net.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    return self.net(x)
