"""The parts of a trial: which plans, which steps, whose turn, what has changed since."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from mosaic.engine.candidates import SampleComparison
from mosaic.engine.trial import DriftWatch, StepUnit, TrialLock
from mosaic.take_turns import TrialSettings

# Which plans.


# The same numbers.


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


# Which steps.


def optimizer_of(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def test_of_two_optimizers_the_first_counts_until_it_no_longer_steps():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    unit = StepUnit(model)
    first, second, foreign = optimizer_of(model[0]), optimizer_of(model[1]), optimizer_of(nn.Linear(2, 2))
    assert [unit.begins_at_step(one) for one in (first, second, foreign, first)] == [True, False, False, True]
    assert [unit.begins_at_step(second) for _ in range(8)] == [False] * 7 + [True]
    del first, second
    gc.collect()
    assert unit.begins_at_step(optimizer_of(model))


# Whose turn.


def test_one_has_the_turn_until_it_gives_it_or_is_gone():
    class Asker:
        pass

    turn, first, second = TrialLock(), Asker(), Asker()
    assert turn.acquire(first)
    assert turn.acquire(first)
    assert not turn.acquire(second)
    turn.release(second)
    assert not turn.acquire(second)
    turn.release(first)
    assert turn.acquire(second)
    del second
    gc.collect()
    assert turn.acquire(first)


# What has changed since.

SETTINGS = TrialSettings(drift_steps=40)


def test_forty_slow_steps_in_a_row_are_a_drift_and_fewer_are_not():
    watch = DriftWatch([10.0] * 8, "shapes", SETTINGS)
    times = [12.0] * 20 + [10.0] * 20 + [12.0] * 39
    assert [watch.note_time(time) for time in times] == [None] * len(times)
    assert watch.note_time(12.0) == "40 steps in a row were slower than in the trial: 12.00 ms, above 11.00"


@pytest.mark.parametrize("bound", ["steps_per_visit", "drift_steps", "retrial_steps", "warm_steps"])
def test_bounds_below_their_least_are_refused(bound: str):
    with pytest.raises(ValueError, match=rf"{bound}=-1; use [01] or more"):
        TrialSettings(**{bound: -1})
    for name, value in {"max_steps": 3, "smallest_gain": 0.5, "max_plans": 0}.items():
        with pytest.raises(ValueError, match=name):
            TrialSettings(**{name: value})
