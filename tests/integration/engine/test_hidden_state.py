"""State that modules read besides their arguments: as in the plain loop, in place, or refused."""

from __future__ import annotations

import contextvars
import random
import threading
import warnings
from functools import partial
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
from hidden_state_cases import CASES, shown
from hidden_state_cases import train as train_shown
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.engine.calls.attach import is_attached
from mosaic.errors import ModuleContractError, UnsupportedModelError

SCALE = contextvars.ContextVar("SCALE", default=1.0)
OF_THREAD = threading.local()


@pytest.mark.parametrize("case", CASES)
def test_what_is_done_around_a_call_is_seen_by_the_call(case: str):
    in_sample = "another module's result" not in case  # where the sample shows it, that module is not placed
    run_both(partial(shown, case, in_sample), pair_batch(), SIDE_BY_SIDE, train_shown, on_lanes=False)


def test_weights_that_are_written_behind_the_module_s_back_are_an_error_that_names_it():
    gate = threading.Event()

    def waiting(self: Doing, x: torch.Tensor) -> torch.Tensor:
        assert "mosaic-lane" not in threading.current_thread().name or gate.wait(60)
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


def differentiates_forward(self: Doing, x: torch.Tensor) -> torch.Tensor:
    made, slope = torch.func.jvp(self.layers, (x,), (torch.ones_like(x),))
    return made + slope


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


class Setting:
    """Set around the call of the right module, while a lane may still run the left one."""

    scale = 1.0


def scale_of_now() -> float:
    return Setting.scale


def scaled(self: Doing, x: torch.Tensor) -> torch.Tensor:
    return self.layers(x) * scale_of_now()


def set_around_right(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left = self.left(x)
    Setting.scale = 3.0
    right = self.right(y)
    Setting.scale = 1.0
    return left * right


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Glued(set_around_right, Doing(scaled), Doing(scaled)), "'scale', among globals and variables"),
        (lambda: TwoTowers(Doing(in_double)), "it changes the default dtype"),
        (lambda: TwoTowers(Doing(sets_context)), "it sets the context variable 'SCALE'"),
        (lambda: TwoTowers(Doing(draws)), "it draws from Python's or numpy's random numbers"),
        (lambda: TwoTowers(Doing(differentiates_forward)), "it takes forward-mode derivatives"),
        (OfThread, "or a threading.local, whose values a lane"),
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


def test_weights_that_calls_share_by_a_cache_are_computed_in_place():
    def loop(model: nn.Module, record: Record) -> None:
        with parametrize.cached():
            loss = sum(model(*pair_batch(step)).square().mean() for step in range(2))
        loss.backward()
        record.note_model(model)

    def make() -> nn.Module:
        return TwoTowers(nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 16))))

    described = run_both(make, pair_batch(), SIDE_BY_SIDE, loop, on_lanes=False)
    assert "parametrized weights are cached" in described


def test_a_plan_that_places_what_cannot_be_is_refused_by_name_before_training():
    model = TwoTowers()
    plan = plan_for(model, pair_batch(), SIDE_BY_SIDE, HostBackend(num_slots=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.left = torch.jit.script(model.left)
    with pytest.raises(UnsupportedModelError, match=r"places 'left', which cannot be: is scripted by torch.jit"):
        mosaic.colocate(model, sample=pair_batch(), plan=plan, backend=HostBackend(num_slots=2))
    assert not is_attached(model.right)
