"""Counting random draws, and drawing them elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mosaic.engine.calls.random_numbers import (
    LaneRandomness,
    RandomnessWatch,
    advance_default,
    count_draws,
    other_random_state,
)

X = torch.ones(37, 5)
DRAWING: dict[str, Callable[[], torch.Tensor]] = {
    "dropout": lambda: functional.dropout(X, 0.3),
    "feature dropout": lambda: functional.dropout1d(X[None], 0.3),
    "alpha dropout": lambda: functional.alpha_dropout(X, 0.3, True),
    "rand": lambda: torch.rand(11),
    "rand like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(64),
    "randn small": lambda: torch.randn(16, 3),
    "randint": lambda: torch.randint(0, 9, (7,)),
    "permutation": lambda: torch.randperm(23),
    "bernoulli": lambda: torch.bernoulli(X * 0.3),
    "multinomial": lambda: torch.multinomial(X[:, 0], 3),
    "normal": lambda: torch.normal(0.0, 1.0, (32,)),
    "in place": lambda: torch.empty(33).uniform_(),
    "many": lambda: torch.rand(5000).sum() + torch.rand(3),
}


@pytest.mark.parametrize("name", list(DRAWING))
def test_a_lane_draws_what_the_caller_would_have_drawn(name: str):
    draw = DRAWING[name]
    torch.manual_seed(3)
    torch.rand(5)
    before = torch.get_rng_state()
    with RandomnessWatch(None) as watch:
        plain = draw()
    after = torch.get_rng_state()
    draws = count_draws(before, after)
    if watch.obstacle is not None or draws is None:
        return  # such a module stays in place
    torch.set_rng_state(before)
    generator = torch.Generator()
    generator.set_state(before)
    advance_default(draws)
    with LaneRandomness(generator):
        elsewhere = draw()
    assert torch.equal(plain, elsewhere)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(generator.get_state(), after)


@pytest.mark.parametrize("name", ["dropout", "feature dropout", "alpha dropout", "bernoulli", "in place"])
def test_common_operators_can_run_on_a_lane(name: str):
    before = torch.get_rng_state()
    with RandomnessWatch(None) as watch:
        DRAWING[name]()
    assert watch.obstacle is None
    assert count_draws(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["rand", "rand like", "randint"])
def test_operators_that_take_no_generator_stay_in_place(name: str):
    with RandomnessWatch(None) as watch:
        DRAWING[name]()
    assert "which takes no generator" in watch.obstacle


@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 1248, 5001])
def test_draws_are_counted_across_blocks(draws: int):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    torch.empty(draws, dtype=torch.int32).random_()
    assert count_draws(before, torch.get_rng_state()) == draws


def test_states_that_draws_do_not_connect_have_no_count():
    torch.manual_seed(1)
    torch.rand(3)
    before = torch.get_rng_state()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        assert count_draws(before, torch.get_rng_state()) is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_seen(reentrant: bool):
    x = torch.ones(3, requires_grad=True)
    with RandomnessWatch(None) as watch:
        result = checkpoint(torch.sin, x, use_reentrant=reentrant)
    if reentrant:
        assert "Checkpoint" in result.grad_fn.name()
    else:
        assert "activation checkpointing" in watch.obstacle


def test_a_generator_of_one_s_own_is_seen():
    with RandomnessWatch(None) as watch:
        torch.rand(3, generator=torch.Generator())
    assert "a generator of its own" in watch.obstacle


def test_python_s_and_numpy_s_random_numbers_are_seen():
    before = other_random_state()
    assert before == other_random_state()
    random.random()
    middle = other_random_state()
    assert before != middle
    np.random.rand()
    assert middle != other_random_state()
