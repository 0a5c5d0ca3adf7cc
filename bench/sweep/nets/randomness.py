"""Random numbers of torch, Python and numpy, and layers that draw them."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bench.sweep.device import device
from bench.sweep.nets.pieces import Two, alike, batch, between, part, tower, towers, train
from bench.sweep.session import Session


def dropout_in_both_towers(session: Session):
    train(session, Two(tower(nn.Dropout(0.3)), tower(nn.Dropout(0.1))))


def dropout_rate_scheduled_to_zero(session: Session):
    model = Two(tower(nn.Dropout(0.5)))
    train(session, model, before=lambda step: setattr(model.a[5], "p", max(0.0, 0.5 - 0.25 * step)))


@between()
def dropout_that_draws_between_modules(self, x, y):
    a = functional.dropout(self.a(x), 0.2, self.training)
    return self.b(functional.dropout(y, 0.2, self.training)) * a


def _dropping_layers(draw):
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                if not self.training or draw() > 0.3:
                    x = layer(x).tanh()
            return x

    return Two(Dropping(), Dropping())


def layers_dropped_by_python(session: Session):
    train(session, _dropping_layers(random.random), steps=6)


def layers_dropped_by_numpy(session: Session):
    train(session, _dropping_layers(np.random.rand), steps=6)


def layers_dropped_by_torch(session: Session):
    train(session, _dropping_layers(lambda: torch.rand([], device=device()).item()), steps=6)


def random_numbers_drawn_by_the_loop(session: Session):
    def drawn(step):
        session.note(random.random(), np.random.rand(), torch.rand(2, device=device()))

    train(session, Two(tower(nn.Dropout(0.3))), before=drawn)


@towers(net=tower, generator=lambda: torch.Generator(device()).manual_seed(3))
def generator_of_its_own(self, x):
    return self.net(x + 0.1 * torch.randn(x.shape, generator=self.generator, device=x.device))


def generator_shared_by_towers(session: Session):
    generator = torch.Generator(device()).manual_seed(3)

    def noisy(self, x):
        return self.net(x + 0.1 * torch.randn(x.shape, generator=generator, device=x.device))

    train(session, Two(*alike(noisy)))


def seed_set_in_forward(session: Session):
    def seeded(self, x):
        torch.manual_seed(self.seed)
        return self.net(x)

    train(session, Two(*(part(seeded, net=lambda: tower(nn.Dropout(0.2)), seed=seed) for seed in (1, 2))))


@between(towers=lambda: (tower(nn.Dropout(0.2)), tower(nn.Dropout(0.2))))
def forked_random_numbers(self, x, y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        a = self.a(x)
    return a * self.b(y)


@between(towers=lambda: (tower(nn.Dropout(0.1)),), batch=lambda step: batch(step, 32))
def mixup_by_a_random_order(self, x, y):
    share = float(np.random.beta(0.4, 0.4))
    order = torch.randperm(len(x), device=x.device)
    return self.a(share * x + (1 - share) * x[order]) * self.b(y)
