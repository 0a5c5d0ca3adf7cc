"""The towers, batches and the loop that most cases start from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.sweep.device import moved
from bench.sweep.session import Session

Batch = tuple[torch.Tensor, ...]


def tower(*last: nn.Module) -> nn.Sequential:
    """Returns a net of 32 to 32 features."""
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32), *last)


class Two(nn.Module):
    """Two towers side by side."""

    def __init__(self, a: nn.Module | None = None, b: nn.Module | None = None) -> None:
        super().__init__()
        self.a = a if a is not None else tower()
        self.b = b if b is not None else tower()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.a(x) * self.b(y)


class Both(Two):
    """Two towers whose results stay apart."""

    def forward(self, x, y):
        return self.a(x), self.b(y)


class Scaled(nn.Module):
    """A tower that reads an attribute."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.net = tower()

    def forward(self, x):
        return self.net(x) * self.scale


def batch(step: int, rows: int = 64) -> Batch:
    """Returns the two inputs of a step."""
    generator = torch.Generator().manual_seed(step)
    return moved(tuple(torch.randn(rows, 32, generator=generator, device="cpu") for _ in range(2)))


def tokens(step: int, rows: int = 16, length: int = 10) -> Batch:
    """Returns the two sequences of tokens of a step."""
    generator = torch.Generator().manual_seed(step)
    return moved(tuple(torch.randint(0, 50, (rows, length), generator=generator) for _ in range(2)))


def squared(model: nn.Module, inputs: Batch) -> torch.Tensor:
    """Returns the mean square of what a model makes."""
    return model(*inputs).square().mean()


_adamw = partial(torch.optim.AdamW, lr=1e-3)


def train(
    session: Session,
    model: nn.Module,
    *,
    batch: Callable[[int], Batch] = batch,
    loss: Callable[[Any, Batch], torch.Tensor] = squared,
    before: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = _adamw,
    steps: int = 4,
) -> None:
    """Colocates a model and trains it; ``before`` and ``after`` are called in each step, round forward and backward."""
    session.colocate(model, batch(0))
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        before(step)
        found = loss(model, batch(step))
        found.backward()
        after(step)
        optimizer.step()
        session.note(found.item())


def train_step(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Trains a model that is colocated for one step."""
    optimizer.zero_grad()
    loss = squared(model, batch(step))
    loss.backward()
    optimizer.step()
    session.note(loss.item())
