"""A model of two towers on two lanes, for the tests of what users see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Trap, TwoTowers, colocate, pair_batch

from mosaic.engine import Handle


@pytest.fixture
def model() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(Trap(), Trap())


@pytest.fixture
def handle(model: TwoTowers) -> Iterator[Handle]:
    found = colocate(model, pair_batch(), SIDE_BY_SIDE)
    for step in range(2):
        model(*pair_batch(step)).sum().backward()
    model.zero_grad()
    yield found
    found.remove()
