"""Hooks on modules, tensors and parameters."""

from __future__ import annotations

import torch
from torch import nn

from bench.sweep.nets.pieces import Two, between, towers, train
from bench.sweep.session import Session


def _hooked(register):
    """Makes a case of a loss that reads what a hook keeps."""

    def case(loss):
        def run(session: Session) -> None:
            model, kept = Two(), {}
            register(model, kept)
            train(session, model, loss=lambda model, inputs: loss(model, inputs, kept))

        run.__module__ = loss.__module__
        return run

    return case


@_hooked(lambda model, kept: model.a[2].register_forward_hook(lambda module, given, made: kept.update(feature=made)))
def hook_keeps_a_feature_for_the_loss(model, inputs, kept):
    return model(*inputs).square().mean() + kept["feature"].square().mean()


def hook_keeps_a_detached_feature(session: Session):
    model, kept = Two(), []
    for layer in (model.a[2], model.b[2]):
        layer.register_forward_hook(lambda module, given, made: kept.append(made.detach().mean()))
    train(session, model)
    session.note(*kept[-4:])


@_hooked(lambda model, kept: model.a.register_forward_hook(lambda module, given, made: kept.update(a=made)))
def hook_on_a_tower_keeps_its_result(model, inputs, kept):
    return model(*inputs).square().mean() + kept["a"].abs().mean()


def forward_hook_replaces_the_result(session: Session):
    model = Two()
    model.a.register_forward_hook(lambda module, given, made: made * 2)
    model.b[0].register_forward_hook(lambda module, given, made: made.tanh())
    train(session, model)


def forward_pre_hook_changes_the_input(session: Session):
    model = Two()
    model.a.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
    train(session, model)


def full_backward_hook_scales_gradients(session: Session):
    model = Two()
    model.a[2].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))
    model.b.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 2,))
    train(session, model)


@between()
def hook_on_a_tensor_between_modules(self, x, y):
    a = self.a(x)
    a.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return a * self.b(y)


@towers(first=lambda: nn.Linear(32, 64), last=lambda: nn.Linear(64, 32))
def hook_on_a_tensor_within_a_tower(self, x):
    hidden = self.first(x).relu()
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient / (gradient.norm() + 1))
    return self.last(hidden)


def hooks_on_parameters(session: Session):
    model = Two()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    train(session, model)


def optimizer_within_the_backward(session: Session):
    model = Two()
    optimizers = {parameter: torch.optim.SGD([parameter], 1e-2) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    train(session, model)


def hook_added_in_mid_training(session: Session):
    model, kept = Two(), []

    def add(step):
        if step == 2:
            model.b[4].register_forward_hook(lambda module, given, made: kept.append(made) or made * 2)

    def loss(model, inputs):
        return model(*inputs).square().mean() + sum(one.mean() for one in kept[-1:])

    train(session, model, before=add, loss=loss)


@between(after=lambda session, model, step: session.note(model.made.grad))
def gradient_kept_of_a_tower_result(self, x, y):
    self.made = self.a(x)
    self.made.retain_grad()
    return self.made * self.b(y)


def hook_for_all_modules(session: Session):
    seen = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, given, made: seen.append(type(module).__name__)
    )
    try:
        train(session, Two())
    finally:
        hook.remove()
    session.note(sorted(seen[-9:]))
