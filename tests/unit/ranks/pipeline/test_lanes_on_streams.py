"""Lanes of a rank that are streams: launched by one thread, and ordered by events where one takes of another."""

from __future__ import annotations

import pytest
import torch
from lane_cases import LanedModel, Seen, check_equal, laned, seen_step
from stream_cases import FakeBackend

RAGGED = ((2, 1), (0, 0), (3, 0), (0, 2), (1, 1))


def made(**options: object) -> LanedModel:
    torch.manual_seed(1)
    return laned(Seen(dropout=0.3).double(), seen_step(*RAGGED), **options)


@pytest.mark.parametrize("own_lanes", [False, True])
def test_lanes_on_streams_make_the_plain_loops_gradients(own_lanes: bool):
    backend, model = FakeBackend(num_slots=4), made(own_lanes=own_lanes)
    with backend.api.watching():
        check_equal(
            model,
            *map(model.drawn, range(2)),
            model.drawn(2, strategy="recompute"),
            backend=lambda: backend,
        )
    used = {launch.stream for launch in backend.api.launches}
    assert len(used) > (3 if own_lanes else 2)
