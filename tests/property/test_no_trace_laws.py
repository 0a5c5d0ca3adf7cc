"""``colocate`` leaves no trace of having run a model, however it ends and whatever the model's forward does."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from no_trace_cases import (
    BACKEND,
    DOINGS,
    Restless,
    by_plan,
    by_profile,
    made,
    no_trace,
    set_globals,
    set_newer_settings,
    set_thread,
)
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import mosaic
from mosaic.engine import find_modules
from mosaic.errors import UnsupportedModelError
from mosaic.find import restore


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small models are copied whole, of large ones all but parameters."""
    if request.param == "large":
        monkeypatch.setattr(restore, "MAX_COPIED_BYTES", 0)
    return str(request.param)


WRITES = {"in place", "by data", "for each", "of a view", "as out", "by numpy", "transposed", "renormed"}
"""Writes into parameters."""


def doings_of(size: str) -> list[str]:
    """All; a large model that writes into its parameters is refused."""
    return [name for name in DOINGS if size == "small" or name not in WRITES | {"plain tensors"}]


@contextmanager
def raising(error: type[BaseException], at: int) -> Iterator[None]:
    """Raises after one of all calls of modules."""
    calls = itertools.count(1)

    def count(*_: Any) -> None:
        if next(calls) == at:
            raise error("told to")

    hook = register_module_forward_hook(count)
    try:
        yield
    finally:
        hook.remove()
        assert next(calls) > at


class Within(nn.Module):
    """Does all of it inside of a module, and so on a lane's thread while that is profiled."""

    def __init__(self, model: Restless) -> None:
        super().__init__()
        self.model = [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (model,) = self.model
        with torch.no_grad():
            for do in model.doings:
                if do not in (set_globals, set_newer_settings, set_thread):
                    do(model, torch.zeros(6, 8, dtype=torch.float32))
        return x * 1


def test_all_of_it_together_is_undone(size: str):
    model, batch = made(doings_of(size))
    with no_trace(model, batch):
        by_plan(model, batch).remove()


def test_profiling_is_undone(size: str):
    model, batch = made(doings_of(size))
    model.left.append(Within(model))
    with no_trace(model, batch):
        handle = by_profile(model, batch)
        assert handle.profile is not None
        handle.remove()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 30])
def test_a_call_that_raises_is_undone(at: int, error: type[BaseException]):
    model, batch = made(doings_of("large"))
    with no_trace(model, batch), raising(error, at):
        if error is ValueError and at > 20:  # a module that fails at one quota is measured at others
            by_profile(model, batch).remove()
        else:
            with pytest.raises(error, match="told to"):
                by_profile(model, batch)


def test_a_model_that_is_refused_is_as_it_was(size: str):
    model, batch = made(doings_of(size))
    with no_trace(model, batch), pytest.raises(UnsupportedModelError, match="called 0 times"):
        mosaic.colocate(model, sample=batch, modules=["spare"], backend=BACKEND)


def test_an_optimizer_that_steps_in_backward_does_not_while_modules_are_profiled():
    model, batch = made([])
    steps: list[torch.Tensor] = []
    for parameter in model.left.parameters():
        parameter.register_post_accumulate_grad_hook(steps.append)
    with no_trace(model, batch):
        by_profile(model, batch).remove()
    assert steps == []
    model(*batch).sum().backward()
    assert len(steps) == 4


def test_an_interrupt_while_things_are_restored_lets_them_be_restored_all_the_same(monkeypatch: pytest.MonkeyPatch):
    model, batch = made(doings_of("small"))
    restoring, interrupts = restore.Objects.restore, [signal.SIGINT]

    def interrupted(self: Any) -> None:
        if interrupts:
            signal.raise_signal(interrupts.pop())
        restoring(self)

    monkeypatch.setattr(restore.Objects, "restore", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with no_trace(model, batch), pytest.raises(KeyboardInterrupt):
            find_modules(model, batch)
    finally:
        signal.signal(signal.SIGINT, before)


def now_and_then(model: Restless, x: torch.Tensor) -> None:
    model.count += 1
    if model.count == 5:
        model.teacher.weight.add_(1)


def test_a_write_that_no_run_showed_is_refused_with_the_tensor_and_the_remedy(size: str):
    model, batch = made([])
    model.doings = [now_and_then]
    model.left.append(Within(model))
    if size == "small":
        with no_trace(model, batch):
            by_profile(model, batch).remove()
    else:
        with pytest.raises(UnsupportedModelError, match=r"teacher\.weight was written to.*exclude="):
            by_profile(model, batch)


def test_a_model_without_shapes_is_refused_before_it_runs():
    model, batch = made([])
    model.lazy = nn.LazyLinear(3)
    with pytest.raises(UnsupportedModelError, match=r"lazy\.weight has no shape yet; call the model once before"):
        find_modules(model, batch)
