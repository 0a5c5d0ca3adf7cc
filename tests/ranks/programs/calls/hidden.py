"""Models whose modules read, write or keep more than arguments and results, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.errors import UnsupportedModelError
from ranks.graphs import check_trained, colocated
from ranks.training import told

SWAPPED = {"a": (1,), "b": (0,)}


class Tower(nn.Module):
    """Reads an attribute; slow, so that it runs late."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 8)
        self.scale: Any = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.ones(512, 512) @ torch.ones(512, 512)
        return self.net(x) * self.scale


class Counts(Tower):
    """Writes an attribute of its own that it reads."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(x) * self.num_calls


class Writes(Tower):
    """Writes into its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


Glue = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Two towers, and something done around the call of the first; ``step`` counts from 0."""

    def __init__(self, glue: Glue, first: type[Tower] = Tower) -> None:
        super().__init__()
        self.a, self.b = first(), Tower()
        self.step = 0
        self.glue = glue

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.glue(self, x).mean(-1) * self.b(x).mean(-1)


def data(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def nothing(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model.a(x)


def an_attribute(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.a.scale = 2.0 + model.step
    made = model.a(x)
    model.a.scale = 1.0
    return made


def parameters(model: Model, x: torch.Tensor) -> torch.Tensor:
    made = model.a(x)
    with torch.no_grad():  # as a teacher's, after its call
        for slow, fast in zip(model.a.parameters(), model.b.parameters(), strict=True):
            slow.mul_(0.5).add_(fast, alpha=0.5)
    return made


def what_differs(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.a.scale = 2.0 + dist.get_rank()
    return model.a(x)


def a_result(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.a.scale = model.b(x).mean()
    made = model.a(x)
    model.a.scale = 1.0
    return made


def hooked() -> Model:
    """A hook keeps a feature that a loss may use."""
    model = Model(nothing)
    model.kept = []  # type: ignore[assignment]
    model.a.net.register_forward_hook(lambda module, args, made: model.kept.append(made))
    return model


def teacher() -> Model:
    model = Model(parameters)
    model.a.requires_grad_(False)
    return model


RIGHT = (lambda: Model(an_attribute), teacher, lambda: Model(nothing, Counts))
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "that is not an argument": lambda: Model(a_result),
    "it writes into its arguments": lambda: Model(nothing, Writes),
    "is kept after its call": hooked,
}


def set_step(model: nn.Module, step: int) -> None:
    model.step = step


def everything(rank: int, size: int) -> None:
    """What changes around a call is for its lane what it was at the call, or the module is refused by name."""
    for make in RIGHT:
        check_trained(make, SWAPPED, lambda step: data(rank + 2 * step), set_step)
    for reason, make in REFUSED.items():
        said = told(lambda make=make: colocated(make(), data(rank), SWAPPED, 2), UnsupportedModelError)  # type: ignore[misc]
        assert "'a' cannot" in said
        assert reason in said
        assert "colocate(..., exclude=['a'])" in said
    model = Model(what_differs)
    handle = colocated(model, data(rank), SWAPPED, 2)
    said = told(lambda: model(data(rank)))
    assert f"'a' has attributes that were set to other values on some of the ranks (on rank {rank}" in said
    assert f"scale = {2.0 + rank}" in said
    handle.remove()
    dist.barrier()
