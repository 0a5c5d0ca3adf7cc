"""Swapping a module's class and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from mosaic.engine.calls.attach import attach, detach


def adding_one(plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return plain(*args, **kwargs) + 1


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


def test_a_parametrization_that_came_after_attaching_stays():
    module = nn.Linear(2, 2)
    attach(module, adding_one)
    parametrizations.weight_norm(module)
    x = torch.ones(1, 2)
    attached = module(x)
    detach(module)
    assert torch.equal(module(x) + 1, attached)
    nn.utils.parametrize.remove_parametrizations(module, "weight")
    assert type(module) is nn.Linear
