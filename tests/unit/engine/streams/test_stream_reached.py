"""Somebody outside reaches into a placed module: both wait for each other from then on, and only those two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, pair_batch
from fake_streams import RaceError
from stream_cases import colocated, steps

Use = Callable[[Any, torch.Tensor], object]


def written_data(right: Any, _: torch.Tensor) -> None:
    for parameter in right.parameters():
        parameter.data.mul_(0.9)


def read_buffer(right: Any, _: torch.Tensor) -> object:
    return right.total * 2


def set_attribute(right: Any, y: torch.Tensor) -> None:
    right.scale = y.mean() * 2


def counting(self: Any, y: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = self.layers(y) * self.scale
    self.total += hidden.detach().sum()
    return hidden


def using(use: Use, when: str) -> Glued:
    """Two towers; in the loop, and not in the sample, something is done to the right one."""

    def glue(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        if when == "before":
            self.reach(use, y)
        right = self.right(y).detach()
        if when == "after":
            self.reach(use, y)
        return left @ right.T

    model = Glued(glue, right=Doing(counting))
    model.right.register_buffer("total", torch.zeros(()))
    model.right.scale = 1.0
    model.__dict__["reach"] = lambda use, y: None
    return model


@pytest.mark.parametrize(
    ("use", "when"),
    [(written_data, "after"), (read_buffer, "after"), (set_attribute, "before")],
)
def test_what_is_done_to_a_module_after_reaching_into_it_is_ordered(
    use: Use, when: str, monkeypatch: pytest.MonkeyPatch
):
    model = using(use, when)
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, _):
        executor = handle._executor
        assert executor is not None
        steps(model)
        site = next(site for site in executor.held if site.name == "right")

        def reach(use: Use, y: torch.Tensor) -> None:
            executor.reach(site)
            use(model.right, y)

        model.__dict__["reach"] = reach
        steps(model)
        monkeypatch.setattr(type(executor), "reach", lambda *_: None)
        with pytest.raises(RaceError):
            steps(model)
