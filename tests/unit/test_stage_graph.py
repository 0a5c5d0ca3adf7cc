"""Stage graphs compute what eager calls do: outputs, gradients, buffers, random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import TwoTowers, pair_batch, tower
from stage_graph_cases import train_both
from torch import nn


def two_towers(model: Any, together: Any, number: int) -> torch.Tensor:
    x, y = pair_batch(number)
    left, right = together(left=(model.left, x), right=(model.right, y))
    return (
        (nn.functional.normalize(left @ model.weight, dim=-1) @ nn.functional.normalize(right, dim=-1).T)
        .square()
        .mean()
    )


def one_by_one(model: Any, together: Any, number: int) -> torch.Tensor:
    x, y = pair_batch(number)
    (left,) = together(left=(model.left, x))
    (right,) = together(right=(model.right, y))
    return (
        (nn.functional.normalize(left @ model.weight, dim=-1) @ nn.functional.normalize(right, dim=-1).T)
        .square()
        .mean()
    )


@pytest.mark.parametrize("step", [two_towers, one_by_one], ids=["together", "one by one"])
@pytest.mark.parametrize("alias", [False, True], ids=["copies", "aliases"])
@pytest.mark.parametrize("extra", [[], [nn.Dropout(0.3)], [nn.BatchNorm1d(16)]], ids=["plain", "dropout", "batchnorm"])
def test_training_by_graphs_equals_training_plainly(extra: list[nn.Module], alias: bool, step: Any):
    ours, _ = train_both(lambda: TwoTowers(tower(8, 16, *extra), tower(8, 16, *extra)), step, options={"alias": alias})
    assert ours.graphs.refused == {}
    assert ours.graphs.num_captures == (1 if step is two_towers else 2)
    assert ours.graphs.num_replays == 5 * ours.graphs.num_captures
