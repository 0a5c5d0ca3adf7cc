"""Common loops: optimizers, evaluation, several models, errors, saving, lanes on and off."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from bench.sweep.device import device, moved
from bench.sweep.nets.pieces import (
    Two,
    after_step,
    alike,
    batch,
    before_step,
    between,
    losses,
    squared,
    stepping,
    tower,
    train,
    train_step,
)
from bench.sweep.session import Session


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


@between()
def inference_mode_for_one_tower(self, x, y):
    with torch.inference_mode():
        a = self.a(x)
    return a.clone() * self.b(y)


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


@losses(lambda: Two(tower(nn.BatchNorm1d(32))))
def model_called_without_its_backward(session, model, inputs):
    model(*batch(70))
    result = squared(model, inputs)
    model(*batch(71)).sum()
    return result


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


@stepping(lambda: Two(*alike(_interrupt, net=lambda: tower(nn.BatchNorm1d(32)), is_interrupted=False)), steps=5)
def keyboard_interrupt_in_mid_step(session, model, optimizer, step):
    model.a.is_interrupted = step == 2
    try:
        train_step(session, model, optimizer, step)
    except KeyboardInterrupt:
        session.note("interrupted")


def generation_in_between(session: Session):
    from bench.sweep.models import find  # a machine with a GPU may be without transformers

    model, draw = find("voxtral")()
    session.colocate(model, moved(draw(torch.Generator().manual_seed(0))))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(4):
        inputs = moved(draw(torch.Generator().manual_seed(step)))
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        model.eval()
        inputs.pop("labels")
        session.note(loss.item(), model.generate(**inputs, max_new_tokens=4, do_sample=step % 2 == 0))
        model.train()


def data_parallel_wrapper(session: Session):
    train(session, nn.DataParallel(Two()))


class Plain(Two):
    """Two towers that pickle can name."""


@after_step(Plain)
def copied_and_pickled_in_mid_training(session, model, step):
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        session.note(copied(*batch(80)).sum().item(), type(copied.a).__name__)


@after_step()
def names_and_types_read_by_the_loop(session, model, step):
    session.note(str(model), [name for name, _ in model.named_modules()], isinstance(model.a, nn.Sequential))
    session.note(len(model.a), sum(p.numel() for p in model.a.parameters()), list(model.state_dict()))


@before_step()
def forward_replaced_on_an_instance(session, model, step):
    if step == 1:
        plain = model.a.forward
        model.a.forward = lambda x: plain(x) * 3


CASES = {
    "types_compared_exactly": after_step()(lambda session, model, step: session.note(type(model.a) is nn.Sequential)),
}
