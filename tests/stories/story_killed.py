"""A user's script that saves after each step, and goes on from where it was: ``story_killed.py FOLDER [STEP]``.

Given a step, it kills itself there.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from story_models import make_batch, make_model, make_target
from torch import nn

import mosaic

STEPS = 6


def train(folder: str | None = None, killed_at: int | None = None) -> nn.Module:
    torch.set_num_threads(1)
    model = make_model()
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state, first, handle = {"optimizer": optimizer, "scheduler": scheduler}, 0, None
    if folder is not None:
        handle = mosaic.colocate(model, sample=make_batch(0))
        loaded = handle.load(folder, **state, missing_ok=True)
        first = loaded.step if loaded else 0
    for step in range(first, STEPS):
        loss = nn.functional.cross_entropy(model(**make_batch(step)), make_target(step))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if handle is not None:
            handle.save(folder, step=step + 1, **state)
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
    if handle is not None:
        handle.export(f"{folder}/trained.safetensors")
        handle.remove()
    return model


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
