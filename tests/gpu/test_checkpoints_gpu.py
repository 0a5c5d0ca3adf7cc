"""Checkpoints of a model on a GPU: copied through pinned memory, with the random numbers of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mosaic.checkpoint.checkpointer import Checkpointer

pytestmark = pytest.mark.gpu


def test_a_run_on_a_gpu_goes_on_bit_for_bit_and_what_came_after_the_save_is_not_in_it(tmp_path: Path):
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Checkpointer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.3), nn.Linear(256, 8)).cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), Checkpointer(model)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[torch.Tensor]:
        for _ in range(num_steps):
            model(torch.randn(16, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model, optimizer, kept = made(0)
    train(model, optimizer, 3)
    kept.save(tmp_path, step=3, optimizer=optimizer)
    ended = train(model, optimizer, 4)
    kept.finish_saving()
    other, again, loaded = made(1)
    assert loaded.load(tmp_path, optimizer=again).step == 3
    assert all(map(torch.equal, train(other, again, 4), ended))
    assert loaded.digest() == kept.digest()
