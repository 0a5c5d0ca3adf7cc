"""Glued models with their towers on lanes: found by their names, and equal to the plain loop bit for bit."""

from __future__ import annotations

import glued_models as cases
import pytest
import torch
from engine_cases import Record, run_both
from torch import nn

from mosaic.glue import MultimodalModel

STAGES = [{"vision": 1, "audio": 1}, {"language_model": 1}]
KINDS = ((3, 2), (0, 2), (3, 2), (2, 0), (0, 0), (3, 2))
"""Images and clips of the batches."""


def frozen() -> MultimodalModel:
    return cases.glued().freeze("vision.model", "audio.model")


def train(model: nn.Module, record: Record) -> None:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for images, clips in KINDS:
        loss = model(**cases.batch(images, clips)).loss
        loss.backward()
        record.note(loss)
        record.note_model(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    record.note_model(model, optimizer)


@pytest.mark.parametrize("make", [cases.glued, frozen])
def test_a_glued_model_trains_colocated_as_it_does_plain_whatever_batches_lack(make: type[MultimodalModel]):
    torch.manual_seed(1)
    run_both(make, cases.batch(), STAGES, train)
