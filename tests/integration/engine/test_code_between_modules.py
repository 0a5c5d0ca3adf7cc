"""Ordinary code around and between placed modules: as in the plain loop on lanes, in place, or refused by name."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import Any

import pytest
import stream_cases
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
    assert "it holds a lock" in described


class Marked(torch.Tensor):
    """A class of a program's own."""


def marks(self: Doing, x: torch.Tensor) -> torch.Tensor:
    made = self.layers(x)
    made.factor = 0.5
    return made


def reads(self: Doing, x: torch.Tensor) -> torch.Tensor:
    return self.layers(x) * getattr(x, "factor", 1.0)


def reading(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x * self.scale
    x.factor = 0.25
    left, right = self.left(x), self.right(y)
    return left * right * getattr(left, "factor", 1.0) * (2.0 if isinstance(right, Marked) else 1.0)


@pytest.mark.parametrize("both", [run_both, stream_cases.run_both])
@pytest.mark.parametrize(
    ("left", "right"), [(marks, lambda self, x: self.layers(x).as_subclass(Marked)), (reads, marks)]
)
def test_attributes_and_classes_of_tensors_go_with_them(both: Any, left: Any, right: Any):
    both(lambda: Glued(reading, Doing(left), Doing(right)), pair_batch(), SIDE_BY_SIDE, train(3), on_lanes=False)


def test_an_attribute_of_a_result_reaches_the_next_module():
    def chain(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        left.factor = 0.25
        return self.middle(left) * self.right(y)

    def make() -> Glued:
        model = Glued(chain)
        model.middle = Doing(reads, 16)
        return model

    stages = [{"left": 1, "right": 1}, {"middle": 1}]
    run_both(make, pair_batch(), stages, train(3), include=["left", "right", "middle"])
    stream_cases.run_both(make, pair_batch(), stages, train(3), include=["left", "right", "middle"])
