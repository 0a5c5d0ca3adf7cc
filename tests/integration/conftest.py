"""A model of two towers on two lanes, for the tests of what users see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Trap, TwoTowers, pair_batch
from engine_cases import colocated as on_host
from stream_cases import colocated as on_streams

from mosaic.engine import Handle


@pytest.fixture
def model() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(Trap(), Trap())


@pytest.fixture(params=["host", "streams"])
def handle(request: pytest.FixtureRequest, model: TwoTowers) -> Iterator[Handle]:
    """Side by side on lanes of the host, and on fake streams, and trained for two steps."""
    colocated = {"host": on_host, "streams": on_streams}[request.param]
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as opened:
        made = opened if isinstance(opened, Handle) else opened[0]
        for step in range(2):
            model(*pair_batch(step)).sum().backward()
        model.zero_grad()
        yield made
