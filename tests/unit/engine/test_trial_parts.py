"""The parts of a trial: the same numbers, and its bounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mosaic.engine.trial import SampleComparison
from mosaic.take_turns import TrialSettings


@pytest.mark.parametrize("factor", [1.001, float("nan"), float("inf")])
def test_a_result_that_is_not_the_plain_loop_s_is_named_with_its_difference(factor: float):
    torch.manual_seed(0)
    model, x, factors = nn.Linear(4, 4), torch.randn(3, 4), [1.0]
    comparison = SampleComparison(model, lambda: model(x) * factors[0], x, ())
    assert comparison.difference() is None
    factors[0] = factor
    difference = comparison.difference()
    assert difference is not None
    assert " differs from the plain loop's by " in difference
    assert model.weight.grad is None


@pytest.mark.parametrize("bound", ["steps_per_visit", "warm_steps"])
def test_bounds_below_their_least_are_refused(bound: str):
    with pytest.raises(ValueError, match=rf"{bound}=-1; use [01] or more"):
        TrialSettings(**{bound: -1})
    for name, value in {"max_steps": 3, "smallest_gain": 0.5, "max_plans": 0}.items():
        with pytest.raises(ValueError, match=name):
            TrialSettings(**{name: value})
