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
