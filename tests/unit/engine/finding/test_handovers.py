"""Results that go into another module as they are, and nowhere else, are told from those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mosaic.engine import find_modules


class Chain(nn.Module):
    """Two modules, and what happens between and after them."""

    def __init__(self, between: Callable[[Chain, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x: torch.Tensor) -> Any:
        return self.between(self, self.first(x))


def looks_at_the_shape(model: Chain, h: torch.Tensor) -> Any:
    assert h.shape[0] == len(h) == h.size(0)
    assert h.requires_grad
    return model.second(h)


def hooks(model: Chain, h: torch.Tensor) -> Any:
    h.register_hook(lambda grad: None)
    return model.second(h)


def keeps_a_gradient(model: Chain, h: torch.Tensor) -> Any:
    h.retain_grad()
    return model.second(h)


@pytest.mark.parametrize("between", [lambda model, h: model.second(h), looks_at_the_shape])
def test_a_result_that_another_module_takes_as_it_is_is_handed_over(between: Callable[[Chain, torch.Tensor], Any]):
    (found,) = find_modules(Chain(between), torch.randn(2, 4), include=["first", "second"]).handovers
    assert (found.source, found.result, found.target, found.argument) == ("first", 0, "second", 0)


@pytest.mark.parametrize(
    "between",
    [
        lambda model, h: model.second(h * 2),
        lambda model, h: model.second(h) + h,
        lambda model, h: (model.second(h), h),
        lambda model, h: {"made": model.second(h), "more": [h.detach()]},
        lambda model, h: model.second(h.view(2, 4)),
        lambda model, h: model.second(h.relu_()),
        lambda model, h: h.sum(),
        hooks,
        keeps_a_gradient,
    ],
    ids=["operation", "used after", "returned", "detached", "view", "in place", "not taken", "hook", "gradient"],
)
def test_a_result_with_any_other_use_is_not(between: Callable[[Chain, torch.Tensor], Any]):
    assert find_modules(Chain(between), torch.randn(2, 4), include=["first", "second"]).handovers == ()


class Same(nn.Module):
    """Returns what it was given, beside what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x + y), x


class Through(nn.Module):
    """A result that is taken twice, or passed on by the module that takes it."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.first, self.second, self.twice = nn.Linear(4, 4), Same(), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h, h if self.twice else x)[0]


@pytest.mark.parametrize("twice", [True, False])
def test_a_result_that_is_taken_twice_or_comes_out_again_is_not(twice: bool):
    found = find_modules(Through(twice), torch.randn(2, 4), include=["first", "second"])
    assert found.graph.edges
    assert found.handovers == ()
