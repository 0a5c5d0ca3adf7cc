"""Steps of the zoo's models under the sequential plan, against the plain loop."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mosaic
from bench.colocate.calls import ALONE, GOAL_US
from bench.record import Figure, median_figure, missing_figure
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.microbench import Budget
from mosaic.models import PAPER_MODELS, build, loss_of, make_batch
from mosaic.plan import plan_from_quotas
from mosaic.take_turns import take_turns

GOAL_RATIO = 1.01
"""Of a step under the sequential plan over a plain one, where a step is longer than LONG_MS."""
LONG_MS = 20.0
WIDEST = 0.01
"""Share of a goal by which an interval may reach beyond it, for the goal to count as met."""
_ROUND_MS = 150.0
_MIN_ROUNDS = 3
_LARGE = ("public", "paper")
_NO_TIME = "the quick form had no time left; run without --quick"


def sequential_name(model: str, size: str) -> str:
    """Returns the name of the figure that has a goal for one model."""
    return f"{model}, {size}: step under the sequential plan over the plain step, ratio"


def plain_name(model: str, size: str) -> str:
    """Returns the name of the plain step's figure."""
    return f"{model}, {size}: plain step, ms"


def measure_models(rounds: int, budget: Budget) -> list[Figure]:
    """Measures the paper's six models at the size that two cores hold, and names what they do not."""
    figures = []
    for index, name in enumerate(PAPER_MODELS):
        if budget.left_s > 0:
            figures += _sequential(name, rounds, Budget(budget.left_s / (len(PAPER_MODELS) - index)))
        else:
            figures += [missing_figure(name_of(name, "tiny"), _NO_TIME) for name_of in (plain_name, sequential_name)]
    for name in PAPER_MODELS:
        for size in _LARGE:
            figures.append(missing_figure(sequential_name(name, size), "needs a GPU: a step takes minutes on a CPU"))
    return figures


def goals(figures: Sequence[Figure]) -> list[str]:
    """Returns a line for each goal: met, not met, or not measured."""
    by_name = {figure.name: figure for figure in figures}
    lines = [_verdict(by_name[ALONE], GOAL_US)]
    for name, size in itertools.product(PAPER_MODELS, ("tiny", *_LARGE)):
        plain, found = by_name.get(plain_name(name, size)), by_name[sequential_name(name, size)]
        if plain is not None and plain.value is not None and plain.value <= LONG_MS:
            lines.append(f"no goal: {found.name}: a step takes {plain.value:.1f} ms, which is not above {LONG_MS:g}")
        else:
            lines.append(_verdict(found, GOAL_RATIO))
    return lines


def _verdict(figure: Figure, goal: float) -> str:
    if figure.value is None:
        return f"not measured: {figure.name}: {figure.reason}"
    assert figure.low is not None
    assert figure.high is not None
    if figure.low > goal:
        verdict = "not met"
    else:
        verdict = "met" if figure.high <= goal + WIDEST * goal else "open, the interval is too wide"
    interval = f"[{figure.low:.3f}, {figure.high:.3f}]"
    return f"{verdict} ({figure.value:.3f} {interval}, goal {goal:g}): {figure.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, one batch, and the loss of what it returns."""

    model: nn.Module
    batch: dict[str, Any]
    loss: Callable[[Any], Tensor] = loss_of


@dataclass(frozen=True, slots=True)
class Loop:
    """A model with its optimizer and one batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, Any]
    loss: Callable[[Any], Tensor] = loss_of

    @staticmethod
    def of(model: nn.Module, batch: dict[str, Any], loss: Callable[[Any], Tensor] = loss_of) -> Loop:
        """Makes the loop that everything here is measured with."""
        return Loop(model, torch.optim.AdamW(model.parameters(), 1e-4), batch, loss)

    def step_ms(self) -> float:
        """Takes one training step."""
        start = time.perf_counter_ns()
        self.loss(self.model(**self.batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (time.perf_counter_ns() - start) / 1e6


def _sequential(name: str, rounds: int, budget: Budget) -> list[Figure]:
    model, batch = build(name, "tiny"), make_batch(name, "tiny")
    plain, placed = Loop.of(copy.deepcopy(model), batch), Loop.of(model, batch)
    backend = HostBackend(torch.get_num_threads())
    graph = find_modules(model, batch).graph
    plan = plan_from_quotas(
        [{part: backend.device.num_slots} for part in graph.topological_order()], graph=graph, device=backend.device
    )
    handle = mosaic.colocate(model, sample=batch, plan=plan, backend=backend)
    try:
        plain_ms, ratios = in_rounds(plain, placed, rounds, budget)
    finally:
        handle.remove()
    return [
        median_figure(plain_name(name, "tiny"), plain_ms),
        median_figure(sequential_name(name, "tiny"), ratios),
    ]


def in_rounds(plain: Loop, ours: Loop, rounds: int, budget: Budget) -> tuple[list[float], list[float]]:
    """Takes steps of both in turn; returns the plain ones' times, and for each round the ratio of the medians.

    There are fewer rounds where the budget ends first, but three at least.
    """
    for loop in (plain, ours):
        loop.step_ms()
        loop.step_ms()
    steps = max(3, round(_ROUND_MS / plain.step_ms()))
    numbers = itertools.count()
    samples = take_turns(
        {
            "ours": lambda: [ours.step_ms() for _ in range(steps)],
            "plain": lambda: [plain.step_ms() for _ in range(steps)],
        },
        rounds,
        more=lambda: next(numbers) < _MIN_ROUNDS or budget.left_s > 0,
    )
    pairs = zip(samples["ours"], samples["plain"], strict=True)
    ratios = [statistics.median(ours_ms) / statistics.median(plain_ms) for ours_ms, plain_ms in pairs]
    return list(itertools.chain(*samples["plain"])), ratios
