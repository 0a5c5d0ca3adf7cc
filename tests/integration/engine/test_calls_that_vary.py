"""Calls that vary from step to step: learned anew, in place, or found out and made good."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, Record, TwoTowers, pair_batch, run_both, train
from torch import nn
from torch.nn import functional


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
        if self.kind == "drops by a function" and x[0, 0] < 0:
            hidden = functional.dropout(hidden, 0.3)
        if self.kind == "shape":
            hidden = hidden[hidden[:, 0] > 0]
        if self.kind == "takes":
            hidden = hidden[: 2 + int(x[0, 0] > 0)]
        return self.last(hidden)


class Ragged(TwoTowers):
    """Keeps books of its own, which a call that is made again must not spoil."""

    def __init__(self, kind: str) -> None:
        super().__init__(Skips(kind), Skips(kind))
        self.steps, self.log = 0, []
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.log.append(random.random())
        self.total += 1
        left, right = functional.dropout(self.left(x), 0.1), self.right(y)
        return torch.cat([left @ self.weight, right]) * self.scale * self.steps


@pytest.mark.parametrize("kind", ["drops", "drops by a function", "shape"])
def test_results_that_depend_on_values_end_in_place_and_nothing_is_counted_twice(kind: str):
    def loop(model: Any, record: Record) -> None:
        random.seed(0)
        train(8)(model, record)
        record.note(model.steps, torch.tensor(model.log), model.left.calls, model.total)

    described = run_both(lambda: Ragged(kind), pair_batch(), SIDE_BY_SIDE, loop)
    assert "depend on values" in described or "another number of random numbers" in described


def test_a_cast_in_the_middle_of_training_is_learned_anew():
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(10, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.table(x.abs().long() % 10))

    class Adds(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.left(x.mean(1).long()).float() * self.right(y.mean(1).long()).float()

    def loop(model: nn.Module, record: Record) -> None:
        for step in range(6):
            if step == 3:
                model.to(torch.bfloat16)
            model(*pair_batch(step)).square().mean().backward()
            record.note_model(model)
            model.zero_grad()

    described = run_both(lambda: Adds(Embeds(), Embeds()), pair_batch(), SIDE_BY_SIDE, loop)
    assert "ran in place" not in described


def number(self: Doing, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return self.layers(x), int((x > 0).sum())


def key(self: Doing, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"many" if x[0, 0] > 0 else "few": self.layers(x)}


def passed_on(self: Doing, x: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = self.layers(x)
    return hidden if x[0, 0] > 0 else hidden * 2


def layout(self: Doing, x: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = self.layers(x)
    return hidden.T.contiguous().T if x[0, 0] > 0 else hidden


def by_number(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (left, weight), (right, other) = self.left(x), self.right(y)
    return left * weight + right * other


def by_key(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = self.left(x), self.right(y)
    return left.get("many", 0) * 3 + left.get("few", 0) + next(iter(right.values()))


def by_order(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = self.left(x), self.right(y)
    return left * left.stride(0) + right.is_contiguous()


def both(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.left(x) + self.right(y)


@pytest.mark.parametrize(("what", "glue"), [(number, by_number), (key, by_key), (passed_on, both), (layout, by_order)])
def test_what_a_result_is_besides_its_shape_may_depend_on_values(what: Callable[..., Any], glue: Callable[..., Any]):
    run_both(lambda: Glued(glue, Doing(what), Doing(what)), pair_batch(), SIDE_BY_SIDE, train(10), on_lanes=False)


def test_a_hook_that_takes_another_s_place_is_seen():
    def loop(model: Any, record: Record) -> None:
        for step in range(8):
            hook = model.left.register_forward_hook(lambda _, given, made, step=step: made * (1 + step // 4))
            loss = model(*pair_batch(step)).square().mean()
            loss.backward()
            hook.remove()
            record.note(loss)
            record.note_model(model)

    run_both(TwoTowers, pair_batch(), SIDE_BY_SIDE, loop, on_lanes=False)
