"""Swapping a module's class and back."""

from __future__ import annotations

import copy
import pickle
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


def test_an_attached_module_looks_like_itself(module: Doubling):
    assert isinstance(module, Doubling)
    assert (type(module).__name__, type(module).__qualname__, type(module).__doc__) == (
        "Doubling",
        "Doubling",
        "Doubles.",
    )
    assert repr(module) == repr(Doubling())
    assert vars(module).keys() == vars(Doubling()).keys()
    assert list(module.state_dict()) == ["weight"]


def test_hooks_run_inside(module: Doubling):
    module.register_forward_hook(lambda module, args, result: result * 10)
    assert module(torch.ones(())) == 21


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_plain(module: Doubling, duplicate: Any):
    twin = duplicate(module)
    assert type(twin) is Doubling
    assert twin(torch.ones(())) == 2
    assert module(torch.ones(())) == 3


def test_another_instance_of_the_swapped_class_runs_plainly(module: Doubling):
    twin = type(module)()
    assert twin(torch.ones(())) == 2


def test_attaching_twice_is_refused(module: Doubling):
    with pytest.raises(ValueError, match="this Doubling is colocated already"):
        attach(module, adding_one)
    assert module(torch.ones(())) == 3
