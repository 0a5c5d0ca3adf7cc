"""``describe()`` names a model's changes after it was colocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_cases import SIDE_BY_SIDE, TwoTowers, colocated, pair_batch, tower
from torch import nn


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: model.left.extend([nn.Linear(16, 16), nn.Linear(16, 16)]),
            "left was changed after colocating (left.3 was added and 1 more) and still runs on the lane",
        ),
        (
            lambda model: setattr(model, "left", tower()),
            "left was replaced after colocating, so that no lane runs it: call handle.replan(",
        ),
        (lambda model: model.left.double(), "left was float32 on cpu when it was colocated and is float64 on cpu now"),
        (lambda model: setattr(model, "fusion", tower()), "fusion was added after colocating; no plan knows of it"),
        (lambda model: (model.load_state_dict(model.state_dict()), model.eval()), None),
    ],
)
def test_a_change_after_colocating_is_described(change: Callable[[TwoTowers], object], said: str | None):
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as handle:
        model(*pair_batch()).sum().backward()
        unchanged = handle.describe()
        assert "coloca" not in unchanged
        change(model)
        described = handle.describe()
    if said is None:
        assert described == unchanged
    else:
        (line,) = set(described.splitlines()) - set(unchanged.splitlines())
        assert said in line
