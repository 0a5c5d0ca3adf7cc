"""Number formats: autocast in all places, scaled losses, half and double, complex, moves in mid-training."""

from __future__ import annotations

import torch
from torch import nn

from bench.sweep.device import device, moved
from bench.sweep.nets.pieces import (
    Two,
    alike,
    batch,
    before_step,
    between,
    losses,
    net,
    sgd,
    squared,
    tower,
    towers,
    train,
)
from bench.sweep.session import Session


def _bf16():
    return torch.autocast(device().type, torch.bfloat16)


@losses()
def autocast_around_the_model(session, model, inputs):
    with _bf16():
        return model(*inputs).float().square().mean()


@between()
def autocast_around_one_tower(self, x, y):
    with _bf16():
        a = self.a(x)
    return a.float() * self.b(y)


@towers()
def autocast_within_a_tower(self, x):
    with _bf16():
        return self.net(x).float()


def _off_for_b(self, x, y):
    a = self.a(x)
    with torch.autocast(device().type, enabled=False):
        return a.float() * self.b(y.float())


@losses(model=lambda: net(_off_for_b))
def autocast_switched_off_for_one_tower(session, model, inputs):
    with _bf16():
        return model(*inputs).square().mean()


def autocast_around_the_whole_step(session: Session):
    with _bf16():
        train(session, Two(), loss=lambda model, inputs: model(*inputs).float().square().mean())


@losses()
def autocast_without_its_cache(session, model, inputs):
    with torch.autocast(device().type, torch.bfloat16, cache_enabled=False):
        return model(*inputs).float().square().mean()


def autocast_from_the_third_step(session: Session):
    calls = [0]

    def loss(model, inputs):
        with torch.autocast(device().type, torch.bfloat16, enabled=calls[0] > 1):
            return model(*inputs).float().square().mean()

    train(session, Two(), loss=loss, before=lambda step: calls.__setitem__(0, step), steps=6)


def scaled_losses(session: Session):
    model = Two()
    session.colocate(model, batch(0))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(device().type, init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast(device().type, torch.float16):
            loss = squared(model, batch(step)) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        session.note(loss.item(), scaler.get_scale())


def bfloat16_weights(session: Session):
    train(session, Two().bfloat16(), batch=lambda step: tuple(part.bfloat16() for part in batch(step)))


@between(setup=lambda model: model.a.bfloat16())
def half_precision_tower_beside_a_float_one(self, x, y):
    return self.a(x.bfloat16()).float() * self.b(y)


def _with_words(self, tokens):
    return self.net(self.table(tokens))


def _words(step):
    generator = torch.Generator().manual_seed(step)
    return moved(tuple(torch.randint(0, 20, (64,), generator=generator) for _ in range(2)))


@before_step(
    model=lambda: Two(*alike(_with_words, table=lambda: nn.Embedding(20, 32), net=tower)),
    batch=_words,
    loss=lambda model, inputs: model(*inputs).float().square().mean(),
    optimizer=sgd,
)
def model_made_bfloat16_in_mid_training(session, model, step):
    if step == 2:
        model.bfloat16()


def model_made_double_in_mid_training(session: Session):
    model = Two()
    train(
        session,
        model,
        loss=lambda model, inputs: squared(model, tuple(part.to(model.a[0].weight.dtype) for part in inputs)),
        before=lambda step: model.double() if step == 2 else None,
        optimizer=sgd,
        steps=5,
    )


@towers(weight=lambda: nn.Parameter(torch.randn(17, 17, dtype=torch.cfloat) / 8), net=tower)
def complex_features(self, x):
    return self.net(torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=32))


def _complex(self, x):
    return torch.complex(self.real(x), self.imaginary(x))


@losses(model=lambda: Two(*alike(_complex, real=tower, imaginary=lambda: nn.Linear(32, 32))))
def complex_results(session, model, inputs):
    return model(*inputs).abs().square().mean()


def deterministic_algorithms(session: Session):
    def scatter(self, x):
        return torch.zeros(8, 32, device=x.device).index_add(0, x[:, 0].mul(4).long().remainder(8), self.net(x))

    torch.use_deterministic_algorithms(True)
    try:
        train(session, Two(*alike(scatter)))
    finally:
        torch.use_deterministic_algorithms(False)


@between(towers=lambda: alike(lambda self, x: self.net(x[:, None]), net=lambda: nn.Conv1d(1, 8, 5, padding=2)))
def flags_of_backends_set_around_a_call(self, x, y):
    with torch.backends.mkldnn.flags(enabled=False):
        a = self.a(x)
    return a * self.b(y)
