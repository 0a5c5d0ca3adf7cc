"""Ordinary code around and between placed modules: as in the plain loop on lanes, in place, or refused by name."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, Record, colocated, pair_batch, run_both, train
from torch import nn
from torch.autograd.graph import register_multi_grad_hook


def product(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.left(x) * self.right(y)


def hooks(model: nn.Module, called: list[float]) -> list[Any]:
    return [parameter.register_hook(lambda grad: grad * 0.5) for parameter in model.parameters()]


def hooks_after(model: nn.Module, called: list[float]) -> list[Any]:
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    return [parameter.register_post_accumulate_grad_hook(halve) for parameter in model.parameters()]


def hook_of_all(model: nn.Module, called: list[float]) -> list[Any]:
    towers = [*model.left.parameters(), *model.right.parameters()]
    return [register_multi_grad_hook(towers, lambda grads: called.extend(float(grad.norm()) for grad in grads))]


@pytest.mark.parametrize(("register", "asked"), [(hooks_after, False), (hook_of_all, False), (hooks, True)])
def test_hooks_on_parameters_registered_before_backward_get_their_gradients(register: Any, asked: bool):
    def loop(model: nn.Module, record: Record) -> None:
        for step in range(4):
            loss, called = model(*pair_batch(step)).square().mean(), []
            registered = register(model, called)
            if asked:
                record.note(*torch.autograd.grad(loss, [*model.left.parameters(), *model.right.parameters()]))
            else:
                loss.backward()
            for hook in registered:
                hook.remove()
            record.note(torch.tensor(called))
            record.note_model(model)

    run_both(lambda: Glued(product), pair_batch(), SIDE_BY_SIDE, loop)


def test_a_forked_child_runs_in_place():
    model = Glued(product)
    with colocated(model, pair_batch(), SIDE_BY_SIDE), torch.no_grad():
        expected = [model(*pair_batch()) for _ in range(3)][-1]
        if (child := os.fork()) == 0:
            signal.alarm(60)
            torch.set_num_threads(1)  # as in a worker of a DataLoader: threads of OpenMP do not survive a fork
            os._exit(0 if torch.equal(model(*pair_batch()), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_model_and_its_lanes_are_freed():
    def step() -> weakref.ref[nn.Module]:
        model = Glued(product, Doing(lambda self, x: self.layers(x)))
        with colocated(model, pair_batch(), SIDE_BY_SIDE):
            for _ in range(2):
                model(*pair_batch()).sum().backward()
        return weakref.ref(model)

    before = threading.active_count()
    model = step()
    gc.collect()
    assert model() is None
    assert threading.active_count() == before


def test_modules_that_take_a_lock_run_in_place():
    lock = threading.RLock()

    def locked(self: Doing, x: torch.Tensor) -> torch.Tensor:
        with lock:
            return self.layers(x)

    def all_locked(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with lock:
            return self.left(x) * self.right(y)

    described = run_both(
        lambda: Glued(all_locked, Doing(locked), Doing(locked)), pair_batch(), SIDE_BY_SIDE, train(3), on_lanes=False
    )
    assert "a lock, for which its lane and its caller would wait for each other" in described
