"""Backward in all its forms: several, partial, of gradients, through functions of one's own, views, in place."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.sweep.device import device
from bench.sweep.nets.pieces import (
    Both,
    Two,
    after_step,
    batch,
    between,
    losses,
    squared,
    stepping,
    tower,
    towers,
    train,
)
from bench.sweep.session import Session


@stepping(model=Both)
def a_backward_for_each_loss(session, model, optimizer, step):
    optimizer.zero_grad()
    a, b = model(*batch(step))
    a.square().mean().backward()
    b.square().mean().backward()
    optimizer.step()
    session.note(a.sum().item(), b.sum().item())


@stepping()
def retained_graph(session, model, optimizer, step):
    optimizer.zero_grad()
    loss = squared(model, batch(step))
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    optimizer.step()
    session.note(loss.item())


@losses()
def penalty_on_gradients(session, model, inputs):
    x = inputs[0].requires_grad_()
    made = model(x, inputs[1])
    (gradient,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    return made.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


@towers()
def penalty_within_a_tower(self, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)[0]


@losses()
def adversarial_inputs(session, model, inputs):
    x = inputs[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(x, inputs[1]).square().mean(), x)
    return model((x + 0.1 * gradient.sign()).detach(), inputs[1]).square().mean()


@between(towers=lambda: (tower(nn.Dropout(0.1)),))
def checkpointed_towers(self, x, y):
    a = checkpoint(self.a, x, use_reentrant=False)
    return a * checkpoint(self.b, y, use_reentrant=False)


@between()
def checkpointed_towers_reentrant(self, x, y):
    x, y = x.requires_grad_(), y.requires_grad_()
    return checkpoint(self.a, x, use_reentrant=True) * checkpoint(self.b, y, use_reentrant=True)


def checkpoints_within_towers(session: Session):
    class Saving(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.first, self.net, self.reentrant = nn.Linear(32, 32), tower(nn.Dropout(0.2)), reentrant

        def forward(self, x):
            return checkpoint(self.net, self.first(x), use_reentrant=self.reentrant)

    train(session, Two(Saving(False), Saving(True)))


@losses()
def checkpoint_around_the_model(session, model, inputs):
    return checkpoint(model, *inputs, use_reentrant=False).square().mean()


@losses(model=Both)
def one_tower_unused_in_the_loss(session, model, inputs):
    a, b = model(*inputs)
    return a.square().mean() + 0 * b.detach().sum()


def gradients_set_to_zeros(session: Session):
    model = Two()
    train(session, model, before=lambda step: model.zero_grad(set_to_none=False))


@after_step()
def gradients_read_and_changed_by_the_loop(session, model, step):
    for parameter in model.parameters():
        parameter.grad = parameter.grad / (parameter.grad.norm() + 1e-3)


@stepping()
def gradients_of_some_parameters_only(session, model, optimizer, step):
    optimizer.zero_grad()
    loss = squared(model, batch(step))
    loss.backward(inputs=list(model.a.parameters()))
    optimizer.step()
    session.note(loss.item())


@stepping()
def gradients_of_parameters_by_hand(session, model, optimizer, step):
    loss = squared(model, batch(step))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 0.01 * gradient
    session.note(loss.item())


@stepping()
def gradient_given_to_backward(session, model, optimizer, step):
    optimizer.zero_grad()
    made = model(*batch(step))
    made.backward(torch.ones_like(made) / made.numel())
    optimizer.step()
    session.note(made)


def graph_kept_over_two_steps(session: Session):
    model = Two()
    session.colocate(model, batch(0))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = []
    for step in range(6):
        losses.append(squared(model, batch(step)))
        if step % 2:
            optimizer.zero_grad()
            sum(losses).backward()
            optimizer.step()
            session.note(*[loss.item() for loss in losses])
            losses = []


def anomaly_detection(session: Session):
    with torch.autograd.detect_anomaly(check_nan=True):
        train(session, Two())


@losses()
def saved_tensors_packed(session, model, inputs):
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.cpu().numpy().copy() if not t.requires_grad else t, _unpacked
    ):
        return model(*inputs).square().mean()


def _unpacked(packed):
    return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed).to(device())


@losses()
def losses_that_become_nan(session, model, inputs):
    return (model(*inputs) * float("inf")).square().mean()


@losses()
def forward_mode_derivative(session, model, inputs):
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        made, slope = torch.autograd.forward_ad.unpack_dual(model(x, inputs[1]))
    return made.square().mean() + slope.square().mean()


@stepping(steps=3)
def gradients_for_each_sample(session, model, optimizer, step):
    x, y = batch(step, 8)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def one(parameters, x, y):
        return torch.func.functional_call(model, parameters, (x[None], y[None])).square().mean()

    gradients = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(parameters, x, y)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clamp(-1, 1).mean(0)
    optimizer.step()
    session.note(squared(model, (x, y)).item())
