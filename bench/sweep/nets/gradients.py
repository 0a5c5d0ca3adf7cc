"""Forms of backward: repeated, partial, second-order, checkpointed, through functions, views and in-place writes."""

from __future__ import annotations

import torch
from torch.nn import functional

from bench.sweep.nets.pieces import (
    Both,
    Two,
    alike,
    batch,
    between,
    loop,
    losses,
    squared,
    stepping,
    tower,
    towers,
)
from bench.sweep.session import Session


@stepping(Both)
def a_backward_for_each_loss(session, model, optimizer, step):
    optimizer.zero_grad()
    a, b = model(*batch(step))
    a.square().mean().backward()
    b.square().mean().backward()
    optimizer.step()
    session.note(a.sum().item(), b.sum().item())


@losses()
def penalty_on_gradients(session, model, inputs):
    x = inputs[0].requires_grad_()
    result = model(x, inputs[1])
    (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    return result.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


@towers()
def penalty_within_a_tower(self, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)[0]


@losses(Both)
def one_tower_unused_in_the_loss(session, model, inputs):
    a, b = model(*inputs)
    return a.square().mean() + 0 * b.detach().sum()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@between()
def function_that_writes_its_input(self, x, y):
    return _Doubled.apply(self.a(x)) * self.b(y)


def _quantize(self, x):
    result = self.net(x)
    nearest = torch.cdist(result.detach(), self.book).argmin(1)
    quantized = self.book[nearest]
    if self.training:
        hot = functional.one_hot(nearest, 16).float()
        self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.book.mul_(0.9).add_(0.1 * (hot.T @ result.detach()) / (hot.sum(0)[:, None] + 1))
    return result + (quantized - result).detach(), functional.mse_loss(result, quantized)


@losses(
    lambda: Both(*alike(_quantize, net=tower, book=lambda: torch.randn(16, 32), counts=lambda: torch.zeros(16))),
)
def quantized_with_a_moving_codebook(session, model, inputs):
    (a, first), (b, second) = model(*inputs)
    return (a * b).square().mean() + first + second


@between(setup=lambda model: model.a.requires_grad_(False))
def in_place_operation_on_an_input_after_its_call(self, x, y):
    hidden = x * 2
    a = self.a(hidden.detach())
    hidden.zero_()
    return a * self.b(y) + hidden


@loop
def batch_overwritten_after_the_call(session: Session):
    model, static = Two(), batch(0)
    session.colocate(model, static)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(4):
        for buffer, new in zip(static, batch(step), strict=True):
            buffer.copy_(new)
        loss = squared(model, tuple(part.clone() for part in static))
        static[0].zero_()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.note(loss.item())
