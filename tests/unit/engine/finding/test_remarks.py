"""Remarks tell a model's user what there is to do, and nothing else; what matters is logged."""

from __future__ import annotations

import pytest
import torch
from engine_cases import Glued, pair_batch

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
