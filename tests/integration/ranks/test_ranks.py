"""Modules on some of several ranks: gradients are those of data-parallel training, and ranks that differ are named."""

from __future__ import annotations

from pathlib import Path

import torch
from ranks.cases import run_ranks
from torch import nn

from mosaic.ranks.parameters.elsewhere import Home, give_up


def test_a_module_that_was_given_up_keeps_its_parameters_as_objects_and_no_memory():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    weight = module[0].weight
    optimizer = torch.optim.AdamW(module.parameters())
    home = Home("tower", (1,))
    assert give_up(module, home) == 4 * (9 + 3 + 3 + 3 + 3 + 3) + 8
    assert module[0].weight is weight
    assert weight.is_meta
    assert all(tensor.is_meta for tensor in module.parameters())
    optimizer.step()  # skips what has no gradient
    assert give_up(module, home) == 0


def test_rank_0_profiles_and_solves_for_all(tmp_path: Path):
    first, second = run_ranks("ranks.training:solved", 2, tmp_path)
    assert first[0] == second[0]
    assert first[1] != second[1]
