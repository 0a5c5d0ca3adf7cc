"""Work of one thread, which more threads make no faster: two towers of it are surely faster side by side.

Each phase of a tower is a chain of sums, and then waits for the answer of a device of its own, as modules do that ask
a server. That takes its time on however busy a machine, so that nothing has to be scripted, and no bit depends on the
number of threads.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mosaic.engine import Options, TrialSettings
from mosaic.profiler import ProfileSettings

MAX_STEPS = 80
OPTIONS = Options(
    cache=None,
    trial=TrialSettings(max_steps=MAX_STEPS, max_lost_steps=60.0),
    profiling=ProfileSettings(foreign_share=2.0, sample_seconds=0.2, min_repeats=3, max_repeats=3),
)
"""The default way, whatever else runs on the machine."""


def once_more(test: Callable[[], None]) -> Callable[[], None]:
    """Takes a test again that has failed once: for some seconds a busy machine may have no time for anything."""

    @functools.wraps(test)
    def tried() -> None:
        try:
            test()
        except AssertionError:
            test()

    return tried


class Answered(torch.autograd.Function):
    """Gives a tensor back once a device of its own has answered, and its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, answer_s: float) -> torch.Tensor:
        ctx.answer_s = answer_s
        time.sleep(answer_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.answer_s)
        return grads[0].clone(), None


class Chain(nn.Module):
    """Sums along a sequence, and asks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Answered.apply((x * self.weight).logcumsumexp(-1).tanh(), 0.04)


class Chains(nn.Module):
    """Two towers of that, and a product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Chain(), Chain()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.left(x) * self.right(y)


def chains_batch(step: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 100, generator=generator), torch.randn(rows, 100, generator=generator)


def train_chains(model: nn.Module, steps: range, rows: slice = slice(4)) -> list[float]:
    """Takes a step on some rows of each of some batches; returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in steps:
        loss = model(*(x[rows] for x in chains_batch(step))).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
