"""Modules whose rows depend on each other are told from those that draw random numbers, in each mode and any sample."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from mosaic.errors import UnsupportedModelError
from mosaic.profiler import Subject
from mosaic.ranks.rows.batched import rows_of

WIDTH = 6
Work = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Part(nn.Module):
    """A layer, and something done with what it makes."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)
        self.work = work
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work(self, self.net(x))


def attention(part: nn.Module, y: torch.Tensor) -> torch.Tensor:
    heads = y.view(len(y), 1, 2, WIDTH // 2)
    rate = 0.3 if part.training else 0.0
    return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=rate).flatten(1)


def counts(part: nn.Module, y: torch.Tensor) -> torch.Tensor:
    part.mean += 1
    return y


def averages(part: nn.Module, y: torch.Tensor) -> torch.Tensor:
    part.mean += y.mean(0)
    return y


def pairs(part: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return y.view(-1, 2, WIDTH).mean(1, keepdim=True).expand(-1, 2, -1).flatten(0, 1) if len(y) % 2 == 0 else y


def dropped(part: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return functional.dropout(y, 0.5, part.training)


ALONE: dict[str, Work] = {
    "nothing": lambda part, y: y,
    "dropout twice": lambda part, y: dropped(part, dropped(part, y) * 2),
    "noise": lambda part, y: y + torch.randn_like(y) * torch.rand(()),
    "a dropped path": lambda part, y: y * y.new_empty(len(y), 1).bernoulli_(0.5),
    "numbers of Python and numpy": lambda part, y: y * random.random() + np.random.rand(),
    "attention with dropout": attention,
    "a buffer that counts calls": counts,
}
TOGETHER: dict[str, Work] = {
    "a mean": lambda part, y: y - y.mean(0),
    "a mean in training": lambda part, y: y - (y.mean(0) if part.training else part.mean),
    "a mean in evaluation": lambda part, y: y - (part.mean if part.training else y.mean(0)),
    "a small part of a mean": lambda part, y: y - 0.005 * y.mean(0),
    "a mean behind dropout": lambda part, y: dropped(part, y) - dropped(part, y).mean(0),
    "a buffer of their mean": averages,
    "a mean before noise that is multiplied": lambda part, y: functional.rrelu(y - y.mean(0), training=True),
    "a mean before such noise in place": lambda part, y: functional.rrelu_(y - y.mean(0), training=True),
    "pairs": pairs,
    "rows mixed in training": lambda part, y: y + y[torch.randperm(len(y))] if part.training else y,
}
SAMPLES = {
    "four rows": torch.randn(4, WIDTH),
    "one row": torch.randn(1, WIDTH),
    "equal rows": torch.ones(4, WIDTH),
    "a row of zeros": torch.zeros(1, WIDTH),
}


def rows(work: Work, sample: str) -> tuple[bool, ...]:
    torch.manual_seed(0)
    return rows_of(Subject(name="part", module=Part(work), args=(SAMPLES[sample],), kwargs={}))


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("work", ALONE)
def test_a_module_whose_rows_do_not_depend_on_each_other_can_be_split_whatever_it_draws(work: str, sample: str):
    assert rows(ALONE[work], sample) == (True,)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("work", TOGETHER)
def test_a_module_whose_rows_depend_on_each_other_is_refused(work: str, sample: str):
    with pytest.raises(UnsupportedModelError, match="'part' cannot be split over ranks"):
        rows(TOGETHER[work], sample)


def test_a_trial_leaves_a_module_as_it_was():
    part = Part(lambda part, y: counts(part, dropped(part, y)))
    before = torch.get_rng_state()
    rows_of(Subject(name="part", module=part, args=(SAMPLES["four rows"],), kwargs={}))
    assert part.training
    assert part.mean.abs().max() == 0
    assert torch.equal(torch.get_rng_state(), before)
