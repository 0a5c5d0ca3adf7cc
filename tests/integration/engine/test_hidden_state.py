"""State that modules read besides their arguments: as in the plain loop, in place, or refused."""

from __future__ import annotations

import contextvars
import queue
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import (
    SIDE_BY_SIDE,
    Doing,
    Glued,
    Record,
    TwoTowers,
    colocated,
    pair_batch,
    plan_for,
    run_both,
    tower,
    train,
)
from torch import nn
from torch.nn import functional

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.engine.calls.attach import is_attached
from mosaic.engine.calls.thread_state import on_lane
from mosaic.errors import ModuleContractError, UnsupportedModelError

SCALE = contextvars.ContextVar("SCALE", default=1.0)
OF_THREAD = threading.local()
SEEN: queue.SimpleQueue[bool] = queue.SimpleQueue()  # its content is no state of a model's
"""True for each forward of a left tower that ran on a lane."""


def scaled(self: Doing, x: torch.Tensor) -> torch.Tensor:
    """Layers times a buffer and an attribute, which may be set around the call."""
    SEEN.put(on_lane())
    return self.layers(x) * self.center * self.layers.scale


class Classed(Doing):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.factor


class Scaled(TwoTowers):
    """``around`` changes something of the left tower for one call."""

    def __init__(self, around: Callable[[Any, float], None]) -> None:
        super().__init__(Classed(scaled))
        self.left.register_buffer("center", torch.ones(16))
        self.left.layers.scale = 1.0
        self.around = around

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.around(self, 2.0)
        left = functional.normalize(self.left(x), dim=-1)
        self.around(self, 1.0)
        return torch.cat([left @ self.weight, self.right(y)]) * self.scale


def by_inner_number(model: Any, value: float) -> None:
    model.left.layers.scale = value


def by_buffer_data(model: Any, value: float) -> None:
    model.left.center.data.fill_(value)


def by_class(model: Any, value: float) -> None:
    Classed.factor = value


@pytest.mark.parametrize("around", [by_inner_number, by_buffer_data, by_class])
def test_a_module_that_its_caller_changes_around_the_call_runs_in_place(around: Any):
    seen_on_lanes()
    run_both(lambda: Scaled(around), pair_batch(), SIDE_BY_SIDE, train(5), on_lanes=False)
    assert seen_on_lanes() == 0


def seen_on_lanes() -> int:
    """Takes what was seen so far; returns how often it was a lane."""
    return sum(SEEN.get() for _ in range(SEEN.qsize()))


def test_weights_that_are_written_behind_the_module_s_back_are_an_error_that_names_it():
    gate = threading.Event()

    def waiting(self: Doing, x: torch.Tensor) -> torch.Tensor:
        assert not on_lane() or gate.wait(60)
        return self.layers(x)

    def writing(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = self.left(x)
        if self.writes:
            with torch.no_grad():
                weight.zero_()
            gate.set()
        return result * self.right(y)

    model = Glued(writing, Doing(waiting))
    model.writes, weight = False, model.left.layers[0].weight
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        model(*pair_batch())
        model.writes = True
        with pytest.raises(ModuleContractError, match=r"a parameter of 'left' was written to.*exclude=\['left'\]"):
            model(*pair_batch())


def in_double(self: Doing, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return self.layers(x) * torch.ones(16).float()
    finally:
        torch.set_default_dtype(torch.float32)


def sets_context(self: Doing, x: torch.Tensor) -> torch.Tensor:
    SCALE.set(SCALE.get() * 1.5)
    return self.layers(x) * SCALE.get()


def draws(self: Doing, x: torch.Tensor) -> torch.Tensor:
    return self.layers(x) * random.random()


class OfThread(TwoTowers):
    """Sets a value of this thread around a call."""

    def __init__(self) -> None:
        super().__init__(ReadsThread())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        OF_THREAD.scale = 3.0
        left = self.left(x)
        OF_THREAD.scale = 1.0
        return torch.cat([left @ self.weight, self.right(y)])


class ReadsThread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * getattr(OF_THREAD, "scale", 1.0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TwoTowers(Doing(in_double)), "it changes the default dtype"),
        (lambda: TwoTowers(Doing(sets_context)), "it sets the context variable 'SCALE'"),
        (lambda: TwoTowers(Doing(draws)), "it draws from Python's or numpy's random numbers"),
        (OfThread, "it reads OF_THREAD, a threading.local"),
    ],
)
def test_what_a_lane_cannot_have_keeps_a_module_in_place_and_is_said(make: Any, said: str):
    SCALE.set(1.0)

    def loop(model: nn.Module, record: Record) -> None:
        SCALE.set(1.0)
        random.seed(0)
        train(4)(model, record)

    described = run_both(make, pair_batch(), SIDE_BY_SIDE, loop, on_lanes=False)
    assert said in described


def test_a_plan_that_places_what_cannot_be_is_refused_by_name_before_training():
    model = TwoTowers()
    plan = plan_for(model, pair_batch(), SIDE_BY_SIDE, HostBackend(num_slots=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.left = torch.jit.script(model.left)
    with pytest.raises(UnsupportedModelError, match=r"places 'left', which cannot be: is scripted by torch.jit"):
        mosaic.colocate(model, sample=pair_batch(), plan=plan, backend=HostBackend(num_slots=2))
    assert not is_attached(model.right)
