"""Random numbers of torch, Python and numpy, and layers that draw them."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bench.sweep.device import device
from bench.sweep.nets.pieces import Two, alike, between, models, tower, train
from bench.sweep.session import Session


@between(towers=lambda: (tower(nn.Dropout(0.1)),))
def random_numbers_drawn_between_modules(self, x, y):
    share = float(np.random.beta(0.4, 0.4))
    order = torch.randperm(len(x), device=x.device)
    a = functional.dropout(self.a(share * x + (1 - share) * x[order]), 0.2, self.training)
    return self.b(functional.dropout(y, 0.2, self.training)) * a


def _dropping(draw):
    def forward(self, x):
        for layer in self.layers:
            if not self.training or draw() > 0.3:
                x = layer(x).tanh()
        return x

    return lambda: Two(*alike(forward, layers=lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(6))))


def generator_shared_by_towers(session: Session):
    generator = torch.Generator(device()).manual_seed(3)

    def noisy(self, x):
        return self.net(x + 0.1 * torch.randn(x.shape, generator=generator, device=x.device))

    train(session, Two(*alike(noisy)))


def _seeded(self, x):
    torch.manual_seed(2)
    return self.net(x)


@between(towers=lambda: (tower(nn.Dropout(0.2)), tower(nn.Dropout(0.2))))
def forked_random_numbers(self, x, y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        a = self.a(x)
    return a * self.b(y)


CASES = {
    "random_numbers_drawn_by_the_loop": models(
        lambda: Two(tower(nn.Dropout(0.3)), tower(nn.Dropout(0.1))),
        before=lambda session, model, step: session.note(
            random.random(), np.random.rand(), torch.rand(2, device=device())
        ),
    ),
    "dropout_rate_scheduled_to_zero": models(
        lambda: Two(tower(nn.Dropout(0.5))),
        before=lambda session, model, step: setattr(model.a[5], "p", max(0.0, 0.5 - 0.25 * step)),
    ),
    "layers_dropped_by_python_and_numpy": models(_dropping(lambda: (random.random() + np.random.rand()) / 2), steps=6),
    "layers_dropped_by_torch": models(_dropping(lambda: torch.rand([], device=device()).item()), steps=6),
    "seed_set_in_forward": models(lambda: Two(*alike(_seeded, net=lambda: tower(nn.Dropout(0.2))))),
}
