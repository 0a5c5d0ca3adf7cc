"""Remarks tell a model's user what there is to do, and nothing else; what matters is logged."""

from __future__ import annotations

import logging

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Glued, colocated, pair_batch, tower
from torch import nn

from mosaic.engine import find_modules


def read_before_the_other(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left = self.left(x)
    scale = left.sum().item()
    return left @ self.right(y).T * scale


def read_before_what_needs_it(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left = self.left(x)
    scale = left.sum().item()
    return self.right(left[:, :8] + y) * scale


def read_last(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = self.left(x) @ self.right(y).T
    return both * both.sum().item()


@pytest.mark.parametrize(
    ("glue", "remarked"), [(read_before_the_other, ["left"]), (read_before_what_needs_it, []), (read_last, [])]
)
def test_a_look_at_a_value_is_a_remark_only_where_another_module_waits_for_it_in_vain(glue, remarked: list[str]):
    remarks = find_modules(Glued(glue), pair_batch()).remarks
    assert [remark.module for remark in remarks] == remarked
    assert all("looks at a value of its result (item)" in remark.what for remark in remarks)


def twice(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.left(x) @ self.right(y).T + self.middle(x).sum() + self.middle(y).sum() + self.small(x) * self.small(y)


def one_called_twice() -> Glued:
    model = Glued(twice)
    model.middle, model.small = tower(), nn.Linear(8, 1)
    return model


def test_a_large_module_that_is_not_placed_and_what_matters_are_logged_once(caplog: pytest.LogCaptureFixture):
    model = one_called_twice()
    with caplog.at_level(logging.WARNING, logger="mosaic"), colocated(model, pair_batch(), SIDE_BY_SIDE) as handle:
        for step in range(3):
            model(*pair_batch(step)).sum().backward()
        described = handle.describe()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("middle is not placed and does 4")
    assert "called 2 times in a step" in said
    assert "call it once on a concatenated batch" in said
    assert "not placed: middle: called 2 times in a step" in described
    caplog.clear()
    with caplog.at_level(logging.WARNING), colocated(Glued(read_before_the_other), pair_batch(), SIDE_BY_SIDE):
        pass
    (said,) = [record.getMessage() for record in caplog.records]
    assert "looks at a value of its result (item)" in said
