"""Hooks on modules, tensors and parameters."""

from __future__ import annotations

import torch
from torch import nn

from bench.sweep.nets.pieces import Two, between, squared, train
from bench.sweep.session import Session


def hook_keeps_a_feature_for_the_loss(session: Session):
    model, features = Two(), {}
    model.a[2].register_forward_hook(lambda module, inputs, result: features.update(last=result))
    train(session, model, loss=lambda _, model, inputs: squared(model, inputs) + features["last"].square().mean())


def hook_keeps_a_detached_feature(session: Session):
    model, features = Two(), []
    for layer in (model.a[2], model.b[2]):
        layer.register_forward_hook(lambda module, inputs, result: features.append(result.detach().mean()))
    train(session, model)
    session.note(*features[-4:])


def hooks_change_inputs_and_results(session: Session):
    model = Two()
    model.a.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    model.a.register_forward_hook(lambda module, inputs, result: result * 2)
    model.b[0].register_forward_hook(lambda module, inputs, result: result.tanh())
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


def optimizer_within_the_backward(session: Session):
    model = Two()
    optimizers = {parameter: torch.optim.SGD([parameter], 1e-2) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
        parameter.register_post_accumulate_grad_hook(step)
    train(session, model)


def hook_added_in_mid_training(session: Session):
    model, features = Two(), []

    def add(session, model, step):
        if step == 2:
            model.b[4].register_forward_hook(lambda module, inputs, result: features.append(result) or result * 2)

    def loss(session, model, inputs):
        return squared(model, inputs) + sum(feature.mean() for feature in features[-1:])

    train(session, model, before=add, loss=loss)


@between(after=lambda session, model, step: session.note(model.result.grad))
def gradient_kept_of_a_tower_result(self, x, y):
    self.result = self.a(x)
    self.result.retain_grad()
    return self.result * self.b(y)


def hook_for_all_modules(session: Session):
    seen = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, result: seen.append(type(module).__name__)
    )
    try:
        train(session, Two())
    finally:
        hook.remove()
    session.note(sorted(seen[-9:]))
