"""What a module reads besides its arguments, and what it keeps for later."""

from __future__ import annotations

import contextvars
import threading
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.sweep.nets.pieces import Two, batch, tower, train
from bench.sweep.session import Session


class Scaled(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.net = tower()

    def forward(self, x):
        return self.net(x) * self.scale


def attribute_set_around_the_call(session: Session):
    class Net(Two):
        def forward(self, x, y):
            self.a.scale = 2.0
            a = self.a(x)
            self.a.scale = 1.0
            return a * self.b(y)

    train(session, Net(Scaled(), Scaled()))


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


def counter_warms_a_tower_up(session: Session):
    class Warming(Scaled):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * min(1.0, self.calls / 3)

    model = Two(Warming(), Warming())
    train(session, model, after=lambda step: session.note(model.a.calls, model.b.calls))


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
            return super().forward(x) + torch.linspace(0, 1, 32).float()

    class Net(Two):
        def forward(self, x, y):
            torch.set_default_dtype(torch.float64)
            a = self.a(x)
            torch.set_default_dtype(torch.float32)
            return a * self.b(y)

    train(session, Net(Making(), Making()))


def teacher_averaged_before_its_call(session: Session):
    class Net(Two):
        def forward(self, x, y):
            with torch.no_grad():
                for mine, theirs in zip(self.a.parameters(), self.b.parameters(), strict=True):
                    theirs.mul_(0.9).add_(mine, alpha=0.1)
                target = self.b(y)
            return self.a(x) - target

    model = Net()
    model.b.requires_grad_(False)
    train(session, model)


def teacher_averaged_after_its_call(session: Session):
    class Net(Two):
        def forward(self, x, y):
            with torch.no_grad():
                target = self.b(y)
            online = self.a(x)
            for mine, theirs in zip(self.a.parameters(), self.b.parameters(), strict=True):
                theirs.data.mul_(0.9).add_(mine.data, alpha=0.1)
            return online - target

    model = Net()
    model.b.requires_grad_(False)
    train(session, model)


def teacher_averaged_by_the_loop(session: Session):
    model = Two()
    model.b.requires_grad_(False)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)

    def update(step):
        average(list(model.b.parameters()), list(model.a.parameters()), step)

    train(session, model, before=update)


def averaged_copy_of_the_whole_model(session: Session):
    model = Two()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    train(session, model, before=lambda step: averaged.update_parameters(model))
    session.note(averaged(*batch(9)))


def queue_of_negatives(session: Session):
    class Net(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("queue", torch.randn(32, 256))
            self.place = 0

        def forward(self, x, y):
            q, k = functional.normalize(self.a(x), dim=1), functional.normalize(self.b(y), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1)
            self.queue[:, self.place : self.place + len(k)] = k.detach().T
            self.place = (self.place + len(k)) % 256
            return logits

    train(session, Net())


def queue_kept_in_a_deque(session: Session):
    class Net(Two):
        old = None

        def forward(self, x, y):
            self.old = self.old or deque(maxlen=3)
            a, b = self.a(x), self.b(y)
            self.old.append(b.detach())
            return a @ torch.cat(list(self.old)).T

    train(session, Net(), steps=5)


def memory_bank_written_at_indices(session: Session):
    bank = torch.zeros(128, 32)

    class Net(Two):
        def forward(self, x, y):
            index = y[:, 0].mul(1000).long().remainder(128)
            near = bank[index]
            made = self.a(x)
            bank[index] = 0.5 * near + 0.5 * made.detach()
            return made * self.b(y) + near

    train(session, Net())


def center_of_a_teacher(session: Session):
    class Centered(Scaled):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(32))

        def forward(self, x):
            return super().forward(x) - self.center

    class Net(Two):
        def forward(self, x, y):
            a, b = self.a(x), self.b(y)
            self.b.center.mul_(0.9).add_(b.detach().mean(0), alpha=0.1)
            return functional.cross_entropy(a, b.detach().softmax(-1))

    train(session, Net(Centered(), Centered()))


def buffer_written_before_the_backward(session: Session):
    class Centered(Scaled):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.ones(32))

        def forward(self, x):
            return super().forward(x) + self.center

    class Net(Two):
        def forward(self, x, y):
            a, b = self.a(x), self.b(y)
            self.a.center.mul_(0.5).add_(x.mean(0))
            return a * b

    train(session, Net(Centered(), Centered()))


def running_mean_read_between_modules(session: Session):
    class Tracking(Scaled):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(32))

        def forward(self, x):
            made = super().forward(x)
            self.mean.mul_(0.9).add_(made.detach().mean(0), alpha=0.1)
            return made

    class Net(Two):
        def forward(self, x, y):
            a, b = self.a(x), self.b(y)
            return a * b + (self.a.mean - self.b.mean).square().sum()

    train(session, Net(Tracking(), Tracking()))


def buffer_replaced_in_forward(session: Session):
    class Tracking(Scaled):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(32))

        def forward(self, x):
            made = super().forward(x)
            self.mean = 0.9 * self.mean + 0.1 * made.detach().mean(0)
            return made - self.mean

    train(session, Two(Tracking(), Tracking()))


def buffer_of_one_tower_read_by_the_other(session: Session):
    class Tracking(Scaled):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(tower(), tower(), tower())
            self.register_buffer("mean", torch.zeros(32))

        def forward(self, x):
            made = super().forward(x)
            self.mean.copy_(made.detach().mean(0))
            return made

    class Reading(Scaled):
        def forward(self, x):
            return super().forward(x) - self.other[0].mean

    model = Two(Tracking(), Reading())
    model.b.other = [model.a]
    train(session, model)


def parameter_of_one_tower_read_by_the_other(session: Session):
    class Reading(Scaled):
        def forward(self, x):
            return functional.gelu(super().forward(x) @ self.other[0].weight)[:, :32]

    model = Two(b=Reading())
    model.b.other = [model.a[-1]]
    train(session, model)


def parameters_clamped_in_forward(session: Session):
    class Clamped(Scaled):
        def forward(self, x):
            for parameter in self.net.parameters():
                parameter.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    train(session, Two(Clamped(), Clamped()))


def parameters_normalised_between_calls(session: Session):
    class Net(Two):
        def forward(self, x, y):
            a = self.a(x)
            with torch.no_grad():
                self.b[0].weight.div_(self.b[0].weight.norm())
            return a * self.b(y)

    train(session, Net())


def cache_of_results_by_length(session: Session):
    class Positions(Scaled):
        def forward(self, x):
            made = self.cache.get(len(x))
            if made is None:
                made = self.cache[len(x)] = torch.randn(len(x), 32)
            return super().forward(x) + made

    model = Two(Positions(), Positions())
    model.a.cache, model.b.cache = {}, {}
    train(session, model, batch=lambda step: batch(step, 16 * (1 + step % 2)), steps=6)


def numpy_array_as_state(session: Session):
    class Histogram(Scaled):
        def forward(self, x):
            made = super().forward(x)
            self.seen += np.histogram(made.detach().numpy(), bins=8, range=(-1, 1))[0]
            return made * float(self.seen.std())

    model = Two(Histogram(), Histogram())
    model.a.seen, model.b.seen = np.zeros(8), np.zeros(8)
    train(session, model)


def state_of_an_lstm_carried_over(session: Session):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.state = nn.LSTM(32, 32), None

        def forward(self, x):
            made, state = self.lstm(x[:, None], self.state)
            self.state = tuple(part.detach() for part in state)
            return made[:, 0]

    train(session, Two(Recurrent(), Recurrent()))
