"""Counting random draws, and drawing them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from engine_cases import Glued
from torch import nn
from torch.nn import functional

from mosaic.engine.calls.signature import CallWatch
from mosaic.find import random_numbers
from mosaic.find.random_numbers import (
    CPU,
    LaneRandomness,
    advance,
    count_draws,
    draws_numbers,
    runs_own_code,
    torch_state,
    with_generator,
)

X = torch.ones(37, 5)
DRAWING: dict[str, Callable[[], torch.Tensor]] = {
    "dropout": lambda: functional.dropout(X, 0.3),
    "feature dropout": lambda: functional.dropout1d(X[None], 0.3),
    "alpha dropout": lambda: functional.alpha_dropout(X, 0.3, True),
    "randn small": lambda: torch.randn(16, 3),
    "permutation": lambda: torch.randperm(23),
    "bernoulli": lambda: torch.bernoulli(X * 0.3),
    "multinomial": lambda: torch.multinomial(X[:, 0], 3),
    "normal": lambda: torch.normal(0.0, 1.0, (32,)),
    "in place": lambda: torch.empty(33).uniform_(),
    "many": lambda: torch.rand(5000).sum() + torch.rand(3),
    "into": lambda: torch.rand(9, out=torch.empty(9)) + torch.randn(32, out=torch.empty(32)).sum(),
    "integers into": lambda: torch.randint(3, (5,), out=torch.empty(5, dtype=torch.int64)),
    "integers into, from": lambda: torch.randint(1, 3, (5,), out=torch.empty(5, dtype=torch.int64)),
    "permutation into": lambda: torch.randperm(7, out=torch.empty(7, dtype=torch.int64)),
    "randint from": lambda: torch.randint(2, 9, (7,)),
    "randint of many bits": lambda: torch.randint(2, 2**40, (7,)),
    "drop path": lambda: X * X.new_empty(37, 1).bernoulli_(0.3),
    "attention": lambda: functional.scaled_dot_product_attention(X[None], X[None], X[None], dropout_p=0.2),
    "rrelu": lambda: functional.rrelu(-X, training=True),
    "gumbel": lambda: functional.gumbel_softmax(X),
    **{
        f"{name} {dtype}": partial(draw, dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        for name, draw in {
            "rand": lambda dtype: torch.rand(11, dtype=dtype),
            "randn": lambda dtype: torch.randn(64, dtype=dtype),
            "randint": lambda dtype: torch.randint(9, (7,), dtype=dtype),
            "rand like": lambda dtype: torch.rand_like(X.to(dtype)),
            "randn like": lambda dtype: torch.randn_like(X.to(dtype)),
            "randint like": lambda dtype: torch.randint_like(X.to(dtype), 5),
            "randint like, from": lambda dtype: torch.randint_like(X.to(dtype), 2, 5),
            "randint like, of a tensor": lambda dtype: torch.randint_like(X.to(dtype), torch.tensor(5)),
        }.items()
    },
}


def test_a_generator_that_was_seeded_anew_is_not_searched_for_draws():
    torch.manual_seed(3)
    before = torch_state(CPU)
    torch.manual_seed(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(random_numbers, "advance")  # which the search calls
        assert count_draws(before, torch_state(CPU)) is None


@pytest.mark.parametrize("name", list(DRAWING))
def test_a_lane_draws_what_the_caller_would_have_drawn(name: str):
    draw = DRAWING[name]
    torch.manual_seed(3)
    torch.rand(5)
    before = torch_state(CPU)
    with CallWatch() as watch:
        plain = draw()
    after = torch_state(CPU)
    draws = count_draws(before, after)
    assert watch.obstacle is None
    assert draws
    before.restore()
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    advance(torch.default_generator, draws)
    with LaneRandomness(generator):
        elsewhere = draw()
    assert torch.equal(plain, elsewhere)
    assert after.is_same(torch_state(CPU))
    assert torch.equal(generator.get_state(), torch.get_rng_state())


def test_operators_are_watched_within_functions_that_draw_alone_since_that_slows_all_of_a_module(
    monkeypatch: pytest.MonkeyPatch,
):
    watched: list[bool] = []
    monkeypatch.setattr(random_numbers, "_DrawingOperators", lambda _: watched.append(True) or nullcontext())
    linear, gru, with_dropout = nn.Linear(3, 3), nn.GRU(3, 3), nn.GRU(3, 3, num_layers=2, dropout=0.1)
    with LaneRandomness(torch.Generator()):
        x = gru(linear(torch.ones(2, 3)))[0]
        assert not watched
        with_dropout(x)
    assert len(watched) == 1


def test_an_operator_that_takes_no_generator_stays_in_place():
    with CallWatch() as watch:
        torch.native_dropout(X, 0.3, True)
    assert "aten.native_dropout.default, which takes no generator" in watch.obstacle


@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 1248, 5001])
def test_draws_are_counted_across_blocks(draws: int):
    torch.manual_seed(1)
    before = torch_state(CPU)
    torch.empty(draws, dtype=torch.int32).random_()
    assert count_draws(before, torch_state(CPU)) == draws


def test_all_functions_that_draw_are_seen_by_their_names():
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    overloads = [getattr(each, name) for each in packets for name in getattr(each, "overloads", list)()]
    drawing = {each for each in overloads if draws_numbers(each) and with_generator(each)}
    assert len(drawing) > 50
    unseen = {each.overloadpacket.__name__ for each in drawing if not random_numbers._may_draw(each)}
    assert unseen == {"_fused_dropout", "normal_functional"}  # which no function of torch calls on the CPU


@pytest.mark.parametrize(
    ("module", "is_own"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout()), False),
        (nn.TransformerEncoderLayer(8, 2), False),
        (nn.Sequential(Glued(torch.add)), True),
    ],
)
def test_own_code_is_told_from_torch_s(module: nn.Module, is_own: bool):
    assert runs_own_code(module) is is_own
    module.register_forward_hook(lambda *_: None)
    assert runs_own_code(module)
