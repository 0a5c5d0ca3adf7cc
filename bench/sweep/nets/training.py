"""Loops as people write them: optimizers, schedules, evaluation, several models, errors, saving, lanes on and off."""

from __future__ import annotations

import torch
from torch import nn

from bench.sweep.device import device
from bench.sweep.nets.pieces import (
    Two,
    adamw,
    batch,
    before_step,
    between,
    losses,
    squared,
    stepping,
    tower,
    train,
)
from bench.sweep.session import Session


@stepping(optimizer=adamw, steps=8)
def gradients_accumulated(session, model, optimizer, step):
    loss = squared(model, batch(step)) / 3
    loss.backward()
    session.note(loss.item())
    if step % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()


def gradients_clipped(session: Session):
    model = Two()
    train(session, model, after=lambda step: session.note(nn.utils.clip_grad_norm_(model.parameters(), 1e-4)))


def line_search_of_lbfgs(session: Session):
    model = Two()
    session.colocate(model, batch(0))
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = squared(model, batch(0))
        loss.backward()
        return loss

    for _ in range(3):
        session.note(optimizer.step(closure).item())


@losses()
def penalty_on_all_parameters(session, model, inputs):
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return squared(model, inputs) + 1e-4 * penalty


@before_step()
@torch.no_grad()
def weights_changed_by_the_loop(session, model, step):
    for parameter in model.parameters():
        parameter *= parameter.abs() > 0.01


@before_step(model=lambda: Two(tower(nn.Dropout(0.2), nn.BatchNorm1d(32)), tower(nn.BatchNorm1d(32))))
def evaluation_in_between(session, model, step):
    model.eval()
    with torch.no_grad() if step % 2 else torch.inference_mode():
        session.note(model(*batch(50)).mean().item())
    model.train()


def one_tower_in_eval_mode(session: Session):
    model = Two(tower(nn.Dropout(0.5)), tower(nn.Dropout(0.5)))
    train(session, model, before=lambda step: model.b.train(step % 2 == 1), steps=6)


@between()
def inference_mode_for_one_tower(self, x, y):
    with torch.inference_mode():
        a = self.a(x)
    return a.clone() * self.b(y)


@between(steps=6, calls=0)
def gradients_switched_off_on_some_steps(self, x, y):
    self.calls += 1
    with torch.set_grad_enabled(self.calls % 2 == 0):
        a = self.a(x)
    return a * self.b(y)


def adversarial_pair_of_models(session: Session):
    generator, critic = Two(), Two(tower(nn.Linear(32, 1)), tower(nn.Linear(32, 1)))
    session.colocate(generator, batch(0))
    session.colocate(critic, batch(0))
    first, second = torch.optim.Adam(generator.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
    for step in range(4):
        x, y = batch(step)
        made = generator(x, y)
        second.zero_grad()
        loss = critic(made.detach(), x).mean() - critic(x, y).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        fooled = -critic(made, x).mean()
        fooled.backward()
        first.step()
        session.note(loss.item(), fooled.item())


def two_models_one_after_the_other(session: Session):
    for seed in range(2):
        torch.manual_seed(seed)
        train(session, Two(tower(nn.Dropout(0.1))), steps=3)


def colocated_model_within_a_plain_one(session: Session):
    inner, head = Two(), nn.Linear(32, 4).to(device())
    session.colocate(inner, batch(0))
    optimizer = torch.optim.SGD([*inner.parameters(), *head.parameters()], 1e-2)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = head(inner(head.weight.mean() + x, y)).square().mean()
        loss.backward()
        optimizer.step()
        session.note(loss.item())


@losses()
def model_called_twice_before_backward(session, model, inputs):
    x, y = inputs
    return (model(x, y) - model(y, x)).square().mean()


@losses(model=lambda: Two(tower(nn.BatchNorm1d(32))))
def model_called_without_its_backward(session, model, inputs):
    model(*batch(70))
    made = squared(model, inputs)
    model(*batch(71)).sum()
    return made


@losses()
def tower_called_by_the_loop(session, model, inputs):
    return squared(model, inputs) + model.a(inputs[1]).abs().mean()


@stepping()
def towers_called_by_the_loop_only(session, model, optimizer, step):
    optimizer.zero_grad()
    x, y = batch(step)
    a, b = model.a(x), model.b(y)
    loss = (a @ b.T).square().mean()
    loss.backward()
    optimizer.step()
    session.note(loss.item())
