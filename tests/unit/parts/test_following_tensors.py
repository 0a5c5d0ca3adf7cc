"""Chunks hand over the tensors that later layers read, and not all that they take."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from chained_chunks import chunks_of
from part_models import PartedCase
from parted_equality import check_cut, check_equal
from torch import nn

from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel


class Masked(nn.Module):
    """Layers that read a mask which a module makes; with ``decides`` only if there is something to mask."""

    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.decides = decides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.gate(x) > -100
        if self.decides and bool(mask.all()):
            mask = torch.ones_like(mask)
        for layer in self.layers:
            x = layer(x * mask)
        return x


class Shaped(nn.Module):
    """Layers that use a module's result for its shape alone, and a parameter between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden + torch.zeros_like(first))
            if index == 1:
                hidden *= self.scale
        return hidden


@pytest.mark.parametrize("make", [lambda: Masked(decides=False), lambda: Masked(decides=True), Shaped])
def test_masks_decisions_and_parameters_between_layers_leave_gradients_equal(make: Callable[[], nn.Module]):
    case = PartedCase(
        make=make,
        batch=lambda: {"x": torch.randn(2, 4)},
        cuts=(("model[0:1/3]", "model[1:2/3]", "model[2:3/3]"),),
        loss=torch.sum,
    )
    check_equal(case)


class Selects(nn.Module):
    """Keeps only the rows that a mask names, before its layers."""

    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return (x * self.weight)[rows]

    def __init__(self) -> None:
        super().__init__()
        self.pick = Selects.Pick()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = self.pick(x, rows)
        for layer in self.layers:
            x = layer(x)
        return x


def test_shapes_that_follow_from_values_are_worked_out_for_each_microbatch():
    model = Selects()
    x = torch.randn(3, 4)
    split = find_split(model, {"x": x, "rows": torch.tensor([True, False, True])})
    case = PartedCase(make=lambda: model, batch=dict, cuts=(), loss=torch.sum)
    cut = ("model[0:1/3]", "model[1:2/3]", "model[2:3/3]")
    rank = PartedModel(copy.deepcopy(model), split, chunks_of(*cut), own=[2])
    for rows in ([True, True, True], [False, False, True]):
        batch = {"x": x, "rows": torch.tensor(rows)}
        assert rank.boundary_like(0, batch)["model"][0].shape == (sum(rows), 4)
        check_cut(case, model, split, cut, batch)
