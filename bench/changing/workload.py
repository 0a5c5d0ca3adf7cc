"""A small Multitask-CLIP whose tasks change (Spindle, appendix D): what is trained, and in which phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mosaic.models import build, find_model, make_batch
from mosaic.models.layers import Blocks, Encoder
from mosaic.models.multimodal import Config
from mosaic.models.rows import CLIP_TASKS

MODEL = "multitask-clip"
PHASES: tuple[tuple[str, ...], ...] = (
    ("image_text", "image_audio"),
    ("image_text", "image_audio", "image_depth", "text_depth"),
    ("image_text", "image_audio", "image_depth", "text_depth", "image_thermal", "image_imu"),
    ("image_audio", "image_depth", "image_thermal", "image_imu"),
    ("image_audio", "audio_depth", "image_imu"),
)
"""The tasks of each phase: two join, two more, then text's two end, and thermal's, while one joins."""


def modalities_of(tasks: Sequence[str]) -> tuple[str, ...]:
    """Returns the modalities that tasks have, in the order in which they name them."""
    return tuple(dict.fromkeys(modality for task in tasks for modality in CLIP_TASKS[task].reads))


def _tower(sample: tuple[int, ...], patch: tuple[int, ...], layers: int, width: int, **more: Any) -> Encoder:
    return Encoder(sample=sample, patch=patch, blocks=Blocks(layers=layers, width=width, heads=4), **more)


CONFIG = replace(
    find_model(MODEL).sizes["tiny"],
    encoders={
        "image": _tower((3, 64, 64), (16, 16), 4, 160),
        "audio": _tower((1, 32, 64), (16, 16), 3, 128, stride=(10, 10)),
        "text": _tower((16,), (), 3, 128, vocabulary=1000),
        "depth": _tower((1, 64, 64), (16, 16), 2, 96),
        "thermal": _tower((1, 64, 64), (16, 16), 3, 128),
        "imu": _tower((6, 128), (8,), 2, 96),
    },
)
"""Encoders of unequal size, of some ten milliseconds each on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    config: Config = CONFIG
    """Of the model."""
    phases: tuple[tuple[str, ...], ...] = PHASES
    """The tasks of each."""
    rows: int
    """Rows of each task's batch."""
    rounds: int
    """Rounds of a phase, in which the ways take turns."""
    steps: int
    """Steps of a turn; all count, those that lanes learn from and those of a trial too."""
    sample_seconds: float = 0.1
    """What profiling takes for a point of a module, at least."""

    def make_model(self) -> nn.Module:
        """Returns the model with all six encoders; a phase calls those that its tasks need."""
        return build(MODEL, config=self.config)

    def batches(self) -> tuple[Mapping[str, Any], ...]:
        """Returns a batch of each phase."""
        return tuple(
            make_batch(MODEL, config=self.config, batch=self.rows, seed=number, tasks=tasks)
            for number, tasks in enumerate(self.phases)
        )


TINY = Scale(
    config=CONFIG.tiny(),
    phases=PHASES[:2],
    rows=2,
    rounds=1,
    steps=2,
    sample_seconds=0.005,
)
"""For tests."""
QUICK = Scale(rows=4, rounds=3, steps=3)
FULL = Scale(rows=8, rounds=16, steps=10)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of all ways."""
    return torch.optim.AdamW(model.parameters(), 1e-4)
