"""Lanes that come and go, errors that a loop catches, saving and changing a model in mid-training."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn

from bench.sweep.nets.pieces import (
    Two,
    adamw,
    after_step,
    alike,
    batch,
    before_step,
    losses,
    net,
    part,
    squared,
    stepping,
    tower,
    train,
    train_step,
)
from bench.sweep.session import Session


def lanes_removed_and_colocated_again(session: Session):
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for start in (0, 3):
        handle = session.colocate(model, batch(0))
        for step in range(start, start + 3):
            train_step(session, model, optimizer, step)
        handle.remove()
        train_step(session, model, optimizer, 9)


def lanes_disabled_in_the_middle(session: Session):
    model = Two()
    handle = session.colocate(model, batch(0))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(6):
        if step in (2, 3):
            with handle.disabled():
                train_step(session, model, optimizer, step)
        else:
            train_step(session, model, optimizer, step)


def lanes_disabled_between_forward_and_backward(session: Session):
    model = Two()
    handle = session.colocate(model, batch(0))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(4):
        optimizer.zero_grad()
        loss = squared(model, batch(step))
        with handle.disabled():
            loss.backward()
            more = squared(model, batch(40 + step))
        more.backward()
        optimizer.step()
        session.note(loss.item(), more.item())


def lanes_removed_between_forward_and_backward(session: Session):
    model = Two()
    handle = session.colocate(model, batch(0))
    for step in range(3):
        loss = squared(model, batch(step))
        if step == 2:
            handle.remove()
        loss.backward()
        session.note(loss.item())


def _checked(self, x):
    if not x.isfinite().all():
        raise ValueError("not finite")
    return self.net(x)


def _sometimes_nan(step):
    x, y = batch(step)
    return (x / 0 if step == 2 else x), y


@losses(model=lambda: Two(*alike(_checked)), batch=_sometimes_nan, steps=5)
def error_in_a_tower_is_caught(session, model, inputs):
    try:
        return squared(model, inputs)
    except ValueError as error:
        session.note(str(error))
        return squared(model, batch(60))


def _skip_some(self, x, y):
    a, b = self.a(x), self.b(y)
    if x[0, 0] > 1:
        raise RuntimeError("skip this batch")
    return a * b


@stepping(model=lambda: net(_skip_some, tower(nn.BatchNorm1d(32))), steps=12)
def error_between_modules_is_caught(session, model, optimizer, step):
    try:
        train_step(session, model, optimizer, step)
    except RuntimeError as error:
        session.note(str(error))


@stepping(steps=5)
def wrong_shapes_are_caught(session, model, optimizer, step):
    try:
        squared(model, tuple(part[:, : 32 - step % 2] for part in batch(step)))
    except RuntimeError:
        session.note("wrong")
    train_step(session, model, optimizer, step)


def _interrupt(self, x):
    if self.is_interrupted:
        raise KeyboardInterrupt
    return self.net(x)


@stepping(model=lambda: Two(part(_interrupt, net=lambda: tower(nn.BatchNorm1d(32)), is_interrupted=False)), steps=5)
def keyboard_interrupt_in_mid_step(session, model, optimizer, step):
    model.a.is_interrupted = step == 2
    try:
        train_step(session, model, optimizer, step)
    except KeyboardInterrupt:
        session.note("interrupted")


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.fails = bool(x[0, 0] > 0)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ArithmeticError("no gradient")
        return gradient


def _trained_batch(step):
    return tuple(part.requires_grad_() for part in batch(step))


@stepping(
    model=lambda: Two(part(lambda self, x: self.net(_Fails.apply(x)))), sample=lambda model: _trained_batch(0), steps=6
)
def error_in_backward_is_caught(session, model, optimizer, step):
    optimizer.zero_grad()
    loss = model(*_trained_batch(step)).square().mean()
    try:
        loss.backward()
    except ArithmeticError:
        session.note("skipped")
        return
    optimizer.step()
    session.note(loss.item())


def saved_and_loaded_in_mid_training(session: Session):
    model, file = Two(tower(nn.BatchNorm1d(32))), io.BytesIO()
    session.colocate(model, batch(0))
    optimizer = adamw(model)
    for step in range(5):
        train_step(session, model, optimizer, step)
        if step == 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        if step == 3:
            file.seek(0)
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])


def deepcopied_in_mid_training(session: Session):
    model = Two()
    train(session, model, after=lambda step: session.note(copy.deepcopy(model)(*batch(80)).sum().item()))


class Plain(Two):
    """Two towers that pickle can name."""


@after_step(model=Plain)
def pickled_in_mid_training(session, model, step):
    restored = pickle.loads(pickle.dumps(model))
    session.note(restored(*batch(80)).sum().item(), type(restored.a).__name__)


@after_step()
def names_and_types_read_by_the_loop(session, model, step):
    session.note(str(model), [name for name, _ in model.named_modules()], isinstance(model.a, nn.Sequential))
    session.note(len(model.a), sum(p.numel() for p in model.a.parameters()), list(model.state_dict()))


def types_compared_exactly(session: Session):
    model = Two()
    train(session, model, after=lambda step: session.note(type(model.a) is nn.Sequential))


@before_step()
def initialised_anew_in_mid_training(session, model, step):
    if step == 2:
        model.a.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)


@before_step()
def forward_replaced_on_an_instance(session, model, step):
    if step == 1:
        plain = model.a.forward
        model.a.forward = lambda x: plain(x) * 3
