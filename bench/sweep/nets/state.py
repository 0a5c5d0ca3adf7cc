"""What a module reads besides its arguments, and what it keeps for later."""

from __future__ import annotations

import contextvars
import threading

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.sweep.nets.pieces import Scaled, Two, batch, between, tower, towers, train
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


def attribute_of_a_class_set_between_modules(session: Session):
    class Own(Scaled):
        scale = 1.0

    class Net(Two):
        def forward(self, x, y):
            Own.scale = float(x.mean())
            a = self.a(x)
            Own.scale = float(y.mean())
            return a * self.b(y)

    train(session, Net(Own(), Own()))


def attribute_of_a_tower_read_by_the_other(session: Session):
    class Noting(Scaled):
        def forward(self, x):
            made = super().forward(x)
            self.last = made.detach().mean()
            return made

    class Net(Two):
        def forward(self, x, y):
            a = self.a(x)
            self.b.scale = self.a.last
            return a * self.b(y)

    train(session, Net(Noting(), Scaled()))


def results_collected_in_a_list(session: Session):
    class Collecting(Scaled):
        def forward(self, x):
            made = super().forward(x)
            self.kept.append(made)
            return made

    class Net(Two):
        def forward(self, x, y):
            self.a.kept, self.b.kept = [], []
            product = self.a(x) * self.b(y)
            return product + sum(self.a.kept) - sum(self.b.kept)

    train(session, Net(Collecting(), Collecting()))


def loss_of_a_part_kept_as_an_attribute(session: Session):
    class Regularised(Scaled):
        def forward(self, x):
            made = super().forward(x)
            self.penalty = made.square().mean()
            return made

    def loss(model, inputs):
        return model(*inputs).square().mean() + 0.1 * (model.a.penalty + model.b.penalty)

    train(session, Two(Regularised(), Regularised()), loss=loss)


def dictionary_shared_by_towers(session: Session):
    shared = {"scale": 1.0}

    class Reading(Scaled):
        def forward(self, x):
            return super().forward(x) * shared["scale"]

    class Net(Two):
        def forward(self, x, y):
            shared["scale"] = 3.0
            a = self.a(x)
            shared["scale"] = 0.5
            return a * self.b(y)

    train(session, Net(Reading(), Reading()))


def closure_counts_calls(session: Session):
    calls = 0

    class Counting(Scaled):
        def forward(self, x):
            nonlocal calls
            calls += 1
            return super().forward(x) * calls

    train(session, Two(Counting(), Counting()))


def global_set_by_the_loop(session: Session):
    temperature = [1.0]

    class Cooled(Scaled):
        def forward(self, x):
            return super().forward(x) / temperature[0]

    train(session, Two(Cooled(), Cooled()), before=lambda step: temperature.__setitem__(0, 1.0 + step))


@towers(after=lambda session, model, step: session.note(model.a.calls, model.b.calls), net=tower, calls=0)
def counter_warms_a_tower_up(self, x):
    self.calls += 1
    return self.net(x) * min(1.0, self.calls / 3)


def contextvar_around_the_call(session: Session):
    scale = contextvars.ContextVar("scale", default=1.0)

    class Reading(Scaled):
        def forward(self, x):
            return super().forward(x) * scale.get()

    class Net(Two):
        def forward(self, x, y):
            token = scale.set(2.0)
            a = self.a(x)
            scale.reset(token)
            return a * self.b(y)

    train(session, Net(Reading(), Reading()))


def contextvar_set_once(session: Session):
    scale = contextvars.ContextVar("scale", default=1.0)
    scale.set(2.0)

    class Reading(Scaled):
        def forward(self, x):
            return super().forward(x) * scale.get()

    train(session, Two(Reading(), Reading()))


def thread_local_state(session: Session):
    local = threading.local()
    local.scale = 2.0

    class Reading(Scaled):
        def forward(self, x):
            return super().forward(x) * getattr(local, "scale", 1.0)

    train(session, Two(Reading(), Reading()))


def attention_kernel_chosen_around_the_call(session: Session):
    class Attending(Scaled):
        def forward(self, x):
            q = self.net(x).view(1, 4, -1, 8)
            return functional.scaled_dot_product_attention(q, q, q).reshape(-1, 32)

    class Net(Two):
        def forward(self, x, y):
            with sdpa_kernel(SDPBackend.MATH):
                a = self.a(x)
            return a * self.b(y)

    train(session, Net(Attending(), Attending()))


def default_dtype_changed_around_the_call(session: Session):
    class Making(Scaled):
        def forward(self, x):
            return super().forward(x) + torch.linspace(0, 1, 32, device=x.device).float()

    class Net(Two):
        def forward(self, x, y):
            torch.set_default_dtype(torch.float64)
            a = self.a(x)
            torch.set_default_dtype(torch.float32)
            return a * self.b(y)

    train(session, Net(Making(), Making()))


def cache_of_results_by_length(session: Session):
    class Positions(Scaled):
        def forward(self, x):
            made = self.cache.get(len(x))
            if made is None:
                made = self.cache[len(x)] = torch.randn(len(x), 32, device=x.device)
            return super().forward(x) + made

    model = Two(Positions(), Positions())
    model.a.cache, model.b.cache = {}, {}
    train(session, model, batch=lambda step: batch(step, 16 * (1 + step % 2)), steps=6)


def numpy_array_as_state(session: Session):
    class Histogram(Scaled):
        def forward(self, x):
            made = super().forward(x)
            self.seen += np.histogram(made.detach().cpu().numpy(), bins=8, range=(-1, 1))[0]
            return made * float(self.seen.std())

    model = Two(Histogram(), Histogram())
    model.a.seen, model.b.seen = np.zeros(8), np.zeros(8)
    train(session, model)


@towers(lstm=lambda: nn.LSTM(32, 32), state=None)
def state_of_an_lstm_carried_over(self, x):
    made, state = self.lstm(x[:, None], self.state)
    self.state = tuple(part.detach() for part in state)
    return made[:, 0]
