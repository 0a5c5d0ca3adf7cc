"""Ordinary code around and between placed modules: as in the plain loop on lanes, in place, or refused by name."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, Record, colocated, pair_batch, run_both, train
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional

Glue = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def product(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.left(x) * self.right(y)


def vector_times_matrix(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left = self.left(x)
    return (self.weight[0] @ left.T)[:, None] * self.right(y) + functional.linear(left[0], self.weight)


def recurrent(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.gru(self.left(x)[:, None])[0][:, 0] * self.right(y)


def composites(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = self.left(x), self.right(y)
    conjugated = torch.view_as_real(torch.view_as_complex(left.view(6, 8, 2)).conj().resolve_conj())
    return left.prod(1, keepdim=True) * right + conjugated.sum() + torch.linalg.matrix_norm(left, 2)


@torch.compile(backend="eager")
def fused(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left * torch.sigmoid(right) + 0.5 * right


def compiled(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return fused(self.left(x), self.right(y))


class WithParts(Glued):
    """Has modules of torch's own that are not placed."""

    def __init__(self, glue: Glue, *towers: nn.Module) -> None:
        super().__init__(glue, *towers)
        self.gru = nn.GRU(16, 16, batch_first=True)

    def __deepcopy__(self, memo: Any) -> WithParts:
        twin = WithParts(self.glue)
        twin.load_state_dict(self.state_dict())
        return twin


PLACED = ["left", "right"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("glue", [vector_times_matrix, recurrent, composites, compiled])
def test_operations_between_modules_are_equal_to_the_plain_loop(glue: Glue):
    described = run_both(lambda: WithParts(glue), pair_batch(), SIDE_BY_SIDE, train(3), include=PLACED)
    assert "ran in place" not in described


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
