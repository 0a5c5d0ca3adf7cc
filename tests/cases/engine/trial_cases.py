"""Loops whose steps take as long as a test says, for the tests of trials."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from engine_cases import TwoTowers, pair_batch
from planning_cases import profile_of
from torch import nn

import mosaic
from mosaic.backends.base import Backend
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import Handle, TrialSettings, find_modules
from mosaic.engine.session import name_of
from mosaic.profile import Profile
from mosaic.profiler import environment_of

PLAIN = "plain"
BESIDE = "left:1 + right:1"
IN_TURN = "one module after the other on lanes (left:2, right:2)"

StepTime = Callable[[str], float]
"""Milliseconds of a step, from what runs it."""


def hardly_scaling(_: int, quota: int) -> float:
    """A module that gains a little from each slot."""
    return 4.0 + 0.4 / quota


class LoopClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_settled = 0

    def mark(self) -> float:
        return self.now_ms

    def is_past(self, mark: float) -> bool:
        return mark <= self.now_ms

    def ms_between(self, earlier: float, later: float) -> float:
        return later - earlier

    def settle(self) -> None:
        self.num_settled += 1


def profile_for(model: nn.Module, sample: Any, backend: Backend) -> Profile:
    """A made-up profile: all modules scale badly, so that side by side is predicted best."""
    graph = find_modules(model, sample).graph
    made = profile_of(dict.fromkeys(graph.names, hardly_scaling), num_slots=backend.device.num_slots)
    return dataclasses.replace(made, graph=graph, device=backend.device, environment=environment_of(backend))


@contextmanager
def trying(
    model: nn.Module,
    *,
    backend: Backend | None = None,
    sample: Any = None,
    graphs: Any = False,
    **bounds: Any,
) -> Iterator[tuple[Handle, LoopClock]]:
    """Colocates a model whose plans will be tried."""
    clock = LoopClock()
    backend = backend or HostBackend(num_slots=2)
    sample = pair_batch() if sample is None else sample
    options = mosaic.Options(
        profile=profile_for(model, sample, backend), cuda_graphs=graphs, trial=TrialSettings(**bounds)
    )
    with patch("mosaic.engine.trial.LoopClock", return_value=clock):
        handle = mosaic.colocate(model, sample=sample, options=options, backend=backend)
        try:
            yield handle, clock
        finally:
            handle.remove()


def running(handle: Handle) -> str:
    """Returns the name of the candidate that runs the model now."""
    return PLAIN if handle._placed is None else name_of(handle._placed.plan)


def steps(
    model: TwoTowers,
    handle: Handle,
    clock: LoopClock,
    step_ms: StepTime,
    count: int = 200,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    rows: int = 6,
    until_decided: bool = True,
) -> list[str]:
    """Trains until the trial is decided, or for ``count`` steps; returns what ran each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    ran = []
    for step in range(count):
        if until_decided and ran and not handle.is_trying:
            break
        ran.append(running(handle))
        model(*pair_batch(step, rows)).square().mean().backward()
        clock.now_ms += step_ms(running(handle))
        optimizer.step()
        optimizer.zero_grad()
    return ran


def times(**step_ms: float) -> StepTime:
    """Steps of ``plain``, ``beside`` and ``in_turn``; what is not named takes as long as the plain loop."""
    known = {PLAIN: "plain", BESIDE: "beside", IN_TURN: "in_turn"}
    return lambda name: step_ms.get(known.get(name, ""), step_ms["plain"])
