"""Operations on tensors between modules: functions of one's own, in place, views, straight through."""

from __future__ import annotations

import torch
from torch.nn import functional

from bench.sweep.nets.pieces import Both, Two, alike, batch, between, losses, net, squared, tower, towers
from bench.sweep.session import Session


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


@between()
def reversed_gradients(self, x, y):
    a = self.a(x)
    return a.sum(1) + self.b(Reversed.apply(a, 0.5)).sum(1) + y.sum(1)


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


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, places = x.max(1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.width = x.shape[1]
        return values, places

    @staticmethod
    def backward(ctx, gradient, _):
        (places,) = ctx.saved_tensors
        return functional.one_hot(places, ctx.width) * gradient[:, None]


@between()
def function_with_an_index_as_a_result(self, x, y):
    values, places = _Largest.apply(self.a(x))
    return values[:, None] * self.b(y) + places[:, None]


@towers()
def straight_through(self, x):
    made = self.net(x)
    return made + ((made * 8).round() / 8 - made).detach()


def _quantize(self, x):
    made = self.net(x)
    nearest = torch.cdist(made.detach(), self.book).argmin(1)
    quantized = self.book[nearest]
    if self.training:
        hot = functional.one_hot(nearest, 16).float()
        self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        sums = hot.T @ made.detach()
        self.book.mul_(0.9).add_(0.1 * sums / (hot.sum(0)[:, None] + 1))
    return made + (quantized - made).detach(), functional.mse_loss(made, quantized)


@losses(
    model=lambda: Both(
        *alike(_quantize, net=tower, book=lambda: torch.randn(16, 32), counts=lambda: torch.zeros(16)),
    )
)
def quantized_with_a_moving_codebook(session, model, inputs):
    (a, first), (b, second) = model(*inputs)
    return (a * b).square().mean() + first + second


@between()
def in_place_operations_on_results(self, x, y):
    a, b = self.a(x), self.b(y)
    a += b
    b[:, :4] = a[:, :4].detach()
    return a.clamp_(-1, 1) * b


@between(setup=lambda model: model.a.requires_grad_(False))
def in_place_operation_on_an_input_after_its_call(self, x, y):
    hidden = x * 2
    a = self.a(hidden.detach())
    hidden.zero_()
    return a * self.b(y) + hidden


def _halve(self, x, y):
    a = self.a(x)
    y.mul_(0.5)
    return a * self.b(y)


@losses(model=lambda: net(_halve))
def in_place_operation_on_the_users_batch(session, model, inputs):
    result = model(*inputs).square().mean()
    session.note(inputs[1])
    return result


def batch_overwritten_after_the_call(session: Session):
    model = Two()
    kept = batch(0)
    session.colocate(model, kept)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(4):
        for buffer, new in zip(kept, batch(step), strict=True):
            buffer.copy_(new)
        loss = squared(model, tuple(part.clone() for part in kept))
        kept[0].zero_()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.note(loss.item())


@between()
def views_of_results(self, x, y):
    left, right = self.a(x).chunk(2, 1)
    up, down = self.b(y).view(-1, 2, 16).unbind(1)
    return torch.cat([left * down, right.T.contiguous().T * up], 1).expand(2, -1, -1)


@between()
def result_detached_for_one_of_its_users(self, x, y):
    a = self.a(x)
    return self.b(a.detach() + y) * a
