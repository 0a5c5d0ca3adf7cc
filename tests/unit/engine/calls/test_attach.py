"""Swapping a module's class and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mosaic.engine.calls.attach import attach, detach, is_attached


class Doubling(nn.Module):
    """Doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def adding_one(plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return plain(*args, **kwargs) + 1


@pytest.fixture
def module() -> Doubling:
    made = Doubling()
    attach(made, adding_one)
    return made


def test_calls_go_through_the_interceptor_and_back(module: Doubling):
    x = torch.ones(())
    assert is_attached(module)
    assert module(x) == 3
    assert module(x=x) == 3
    detach(module)
    detach(module)
    assert not is_attached(module)
    assert type(module) is Doubling
    assert module(x) == 2


def test_hooks_run_inside(module: Doubling):
    module.register_forward_hook(lambda module, args, result: result * 10)
    assert module(torch.ones(())) == 21


def test_another_instance_of_the_swapped_class_runs_plainly(module: Doubling):
    twin = type(module)()
    assert twin(torch.ones(())) == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda module: module[1].running_mean,
        lambda module: next(iter(module)),
        lambda module: list(module.children()),
        lambda module: list(module.buffers(recurse=False)),
        lambda module: module.state_dict(),
        lambda module: getattr(module, "1"),
    ],
)
def test_whoever_finds_a_part_of_a_module_is_told_of(read: Any):
    reached: list[str] = []
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    attach(module, adding_one, reach=lambda: reached.append("module"))
    reached.clear()
    read(module)
    assert reached


def test_a_module_that_cannot_be_iterated_over_stays_so():
    module = nn.Linear(2, 2)
    attach(module, adding_one, reach=lambda: None)
    assert not hasattr(module, "__iter__")
