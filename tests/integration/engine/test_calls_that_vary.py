"""Calls that vary from step to step: learned anew, in place, or found out and made good."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, Record, TwoTowers, colocated, pair_batch, run_both, train
from torch import nn
from torch.nn import functional

from mosaic.errors import UnforeseenError


class Skips(nn.Module):
    """Its course, and the shape of its result, depend on values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.5),
            nn.Linear(16, 16),
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.norm(self.first(x))
        if self.kind == "drops" and x[0, 0] > 0:
            hidden = self.drop(hidden)
        if self.kind == "shape":
            hidden = hidden[hidden[:, 0] > 0]
        return self.last(hidden)


class Ragged(TwoTowers):
    """Keeps books of its own, which a call that is made again must not spoil."""

    def __init__(self, kind: str) -> None:
        super().__init__(Skips(kind), Skips(kind))
        self.steps, self.log, self.latest = 0, [], deque([1.0], maxlen=3)
        self.generator = torch.Generator()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.log.append(random.random())
        self.latest.append(torch.rand((), generator=self.generator).item())
        self.total += 1
        left, right = functional.dropout(self.left(x), 0.1), self.right(y)
        return torch.cat([left @ self.weight, right]) * self.scale * self.steps * sum(self.latest)


@pytest.mark.parametrize("kind", ["drops", "shape"])
def test_results_that_depend_on_values_end_in_place_and_nothing_is_counted_twice(kind: str):
    def loop(model: Any, record: Record) -> None:
        random.seed(0)
        train(8)(model, record)
        record.note(model.steps, torch.tensor(model.log), model.left.calls, model.total)

    described = run_both(lambda: Ragged(kind), pair_batch(), SIDE_BY_SIDE, loop)
    assert "depend on values" in described or "another number of random numbers" in described


class Drawing(TwoTowers):
    """Draws from Python's random numbers in every call, or in those whose input asks for it."""

    def __init__(self, *, always: bool) -> None:
        super().__init__(Skips("drops"), Skips("drops"))
        self.always = always

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        factor = random.random() if self.always or x[0, 1] > 0 else 0.5
        return super().forward(x, y) * factor


def test_a_call_that_is_made_again_draws_python_s_numbers_anew():
    def loop(model: Any, record: Record) -> None:
        random.seed(0)
        train(8)(model, record)
        record.note(torch.tensor(random.random()))

    run_both(partial(Drawing, always=True), pair_batch(), SIDE_BY_SIDE, loop)


def test_a_call_that_cannot_draw_python_s_numbers_anew_is_an_error():
    (x, y), model = (tensor.abs() for tensor in pair_batch()), Drawing(always=False)
    with colocated(model, (-x, -y), SIDE_BY_SIDE):
        for _ in range(4):
            model(-x, -y).sum().backward()
        with pytest.raises(UnforeseenError, match="another number of random numbers"):
            model(x, y)


def number(self: Doing, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return self.layers(x), int((x > 0).sum())


def layout(self: Doing, x: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = self.layers(x)
    return hidden.T.contiguous().T if x[0, 0] > 0 else hidden


def by_number(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (left, weight), (right, other) = self.left(x), self.right(y)
    return left * weight + right * other


def by_order(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = self.left(x), self.right(y)
    return left * left.stride(0) + right.is_contiguous()


@pytest.mark.parametrize(("what", "glue"), [(number, by_number), (layout, by_order)])
def test_what_a_result_is_besides_its_shape_may_depend_on_values(what: Callable[..., Any], glue: Callable[..., Any]):
    run_both(lambda: Glued(glue, Doing(what), Doing(what)), pair_batch(), SIDE_BY_SIDE, train(10), on_lanes=False)


@pytest.mark.parametrize("kind", ["again", "crossing", "swapping"])
def test_which_input_reaches_which_result_may_depend_on_values(kind: str):
    def two(self: Doing, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        (x, y), odd = pair, pair[1][0, 0] > 0
        first, second = self.layers(x), y.repeat(1, 2).tanh()
        if odd and kind != "swapping":
            second = second + (y if kind == "again" else x).repeat(1, 2)
        return (second, first) if odd and kind == "swapping" else (first, second)

    def one_used(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scaled = x * self.scale, y * self.scale
        return self.left(scaled)[1] * self.right(y) + scaled[1].repeat(1, 2).sin()

    run_both(lambda: Glued(one_used, Doing(two)), pair_batch(), SIDE_BY_SIDE, train(10))


def test_a_buffer_may_be_written_for_some_values():
    def counted(self: Doing, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] < -0.7:
            self.calls += 1
        return self.layers(x)

    def make() -> Glued:
        model = Glued(lambda self, x, y: self.left(x) * self.right(y), Doing(counted))
        model.left.register_buffer("calls", torch.zeros(()))
        return model

    run_both(make, pair_batch(), SIDE_BY_SIDE, train(10))
