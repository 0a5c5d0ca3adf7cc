"""Ordinary code around and between placed modules: as in the plain loop on lanes, in place, or refused by name."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import Any

import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, colocated, pair_batch, run_both, train
from torch import nn


def product(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.left(x) * self.right(y)


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
