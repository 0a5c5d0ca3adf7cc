"""Losses that ranks without the last layer would have to know of are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mosaic.errors import UnsplittableError
from mosaic.graph import Part
from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel
from mosaic.ranks.pipeline.chunk_work import checked_loss


def test_losses_that_draw_numbers_or_train_beside_the_model_are_refused():
    model, given = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2))), {"input": torch.ones(1, 2)}
    parted = PartedModel(model, find_split(model, given), [[Part(module="model", first=0, count=2, total=2)]])
    output, temperature = model(**given), nn.Parameter(torch.ones(()))
    for loss, said in (
        (lambda output, _: output.sum() * torch.rand(()), "draws random numbers"),
        (lambda output, _: output.sum() * temperature.exp(), r"trains a tensor of shape \(\)"),
        (lambda output, _: output.sum() + None, r"raises TypeError: .* let it read them there"),  # type: ignore[operator]
    ):
        with pytest.raises(UnsplittableError, match=said):
            checked_loss(loss, output, given, parted)
    plain = checked_loss(lambda output, _: output.sum() + model[1].weight.sum(), output, given, parted)
    assert torch.equal(plain, output.sum() + model[1].weight.sum())
