"""Every model of the zoo, tiny, on the host backend: what is found, and that it computes what the plain one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import Record, run_both
from torch import nn

from mosaic import models

FOUND: dict[str, list[set[str]]] = {
    "qwen3-vl": [{"encoders.image", "embed_tokens"}, {"language_model"}, {"lm_head"}],
    "unified-io-2": [
        {"encoders.image", "encoders.audio", "encoders.image_history", "encoders.audio_history"},
        {"encoder"},
        {"decoder"},
    ],
    "imagebind": [{f"encoders.{name}" for name in ("image", "text", "audio", "depth", "thermal", "imu")}],
    "multitask-ofasys": [
        {f"encoders.{name}" for name in ("text", "image", "audio", "video", "struct")},
        {"encoder"},
        {"decoder"},
    ],
}
"""One model of each structure: its modules by how many others stand before them."""


def batch_of(name: str, seed: int = 0) -> dict[str, Any]:
    return models.make_batch(name, batch=2, seed=seed)


def pairs(levels: list[set[str]]) -> list[dict[str, int]]:
    """Stages of two modules at most, each on one core, since convolutions on two add up in another order."""
    stages = []
    for level in levels:
        names = sorted(level)
        for first in range(0, len(names), 2):
            stages.append(dict.fromkeys(names[first : first + 2], 1))
    return stages


def train(name: str, *, steps: int = 3):
    """AdamW on a new batch each step."""

    def loop(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for step in range(steps):
            loss = models.loss_of(model(**batch_of(name, step)))
            loss.backward()
            record.note(loss)
            record.note_model(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        record.note_model(model, optimizer)

    return loop


@pytest.mark.parametrize("name", FOUND)
def test_a_model_trains_colocated_as_it_does_plain(name: str):
    described = run_both(lambda: models.build(name), batch_of(name), pairs(FOUND[name]), train(name))
    assert "in place" not in described, described
