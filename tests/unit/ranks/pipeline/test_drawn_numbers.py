"""Random numbers before each microbatch are the plain loop's, whatever changes between microbatches and steps."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from mosaic.find.random_numbers import random_state
from mosaic.graph import Part
from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel
from mosaic.ranks.pipeline.random_numbers import DrawnNumbers


class Noisy(nn.Sequential):
    def forward(self, x: torch.Tensor, noise: bool = False, rate: float = 0.0) -> torch.Tensor:
        x = super().forward(x)
        if rate or self.settings.rate:
            x = nn.functional.dropout(x, rate or self.settings.rate)
        return x + torch.randn_like(x) if noise else x


def test_flags_modes_and_rates_that_change_draw_what_the_plain_loop_draws():
    model = Noisy(nn.Linear(2, 2), nn.Dropout(0.0), nn.Linear(2, 2))
    model.settings = SimpleNamespace(rate=0.0)
    given = {"x": torch.ones(3, 2)}
    parted = PartedModel(model, find_split(model, given), [[Part(module="model", first=0, count=3, total=3)]])
    numbers = DrawnNumbers(parted)
    changes = (
        lambda: None,
        lambda: setattr(model[1], "p", 0.5),
        lambda: model[1].eval(),
        lambda: setattr(model.settings, "rate", 0.5),
        lambda: setattr(model.settings, "rate", 0.0),
        lambda: model[1].train(),
    )
    for change in changes:
        change()
        for step in ([given, given], [given, {**given, "noise": True}], [given, {**given, "rate": 0.5}]):
            torch.manual_seed(1)
            states = numbers.before_each(step, [numbers.draw(each) for each in step])
            behind = torch.get_rng_state()
            torch.manual_seed(1)
            for one, state in zip(step, states, strict=True):
                assert state is None or state.is_same(random_state(torch.device("cpu")))
                model(**one)
            assert torch.equal(behind, torch.get_rng_state())
            is_dropping = model.settings.rate > 0 or (model[1].training and model[1].p > 0)
            assert numbers.draw(step[-1]) == (step[-1] is not given or is_dropping)
