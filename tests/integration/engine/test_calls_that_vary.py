"""Calls whose results, random numbers or number formats vary from step to step: learned anew, or in place."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Record, TwoTowers, pair_batch, run_both, train
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
