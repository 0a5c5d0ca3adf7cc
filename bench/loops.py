"""Training loops of one process that take turns by blocks, so that drift of the machine affects all equally."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mosaic.microbench import Budget
from mosaic.models import loss_of
from mosaic.take_turns import take_turns

BLOCK_MS = 150.0
"""The length of a loop's turn."""
MIN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, one batch of this process, and the loss of its output."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] = loss_of


class Loop:
    """A model of a workload with its own optimizer."""

    def __init__(self, model: nn.Module, work: Workload) -> None:
        self._model, self._work = model, work
        self._optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step_ms(self) -> float:
        start = time.perf_counter_ns()
        self._work.loss(self._model(**self._work.batch)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return (time.perf_counter_ns() - start) / 1e6


def in_turn(loops: Mapping[str, Loop], rounds: int, budget: Budget) -> dict[str, list[float]]:
    """Returns the median step of each block by loop; at least three rounds."""
    steps = max(3, round(BLOCK_MS / min(loop.step_ms() for loop in loops.values())))
    samples = take_turns(
        {name: lambda loop=loop: [loop.step_ms() for _ in range(steps)] for name, loop in loops.items()},
        itertools.takewhile(lambda number: number < MIN_ROUNDS or budget.left_s > 0, range(rounds)),
    )
    return {name: [statistics.median(block) for block in blocks] for name, blocks in samples.items()}


def ratios(over: list[float], under: list[float]) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]
