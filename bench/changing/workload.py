"""A small Multitask-CLIP whose tasks change (Spindle, appendix D): what is trained, and in which phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mosaic.models import build, make_batch
from mosaic.models.imagebind import MODALITIES, SIZES, ImageBindConfig
from mosaic.models.inputs import InputSizes
from mosaic.models.layers.block import Shape
from mosaic.models.multitask_clip import TASKS

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
    return tuple(dict.fromkeys(modality for task in tasks for modality in TASKS[task]))


def _stack(kind: Shape, layers: int, width: int) -> Shape:
    return replace(kind, layers=layers, width=width, heads=4)


_PAPER = SIZES["paper"]
CONFIG: ImageBindConfig = replace(
    _PAPER,  # without anything random, so that all ways can be held to one loss
    image=_stack(_PAPER.image, 4, 160),
    text=_stack(_PAPER.text, 3, 128),
    audio=_stack(_PAPER.audio, 3, 128),
    depth=_stack(_PAPER.depth, 2, 96),
    thermal=_stack(_PAPER.thermal, 3, 128),
    imu=_stack(_PAPER.imu, 2, 96),
    out_width=64,
    vocabulary=1000,
    inputs=InputSizes(
        image_px=64, text_tokens=16, audio_frames=64, audio_mels=32, depth_px=64, thermal_px=64, imu_samples=128
    ),
)
"""Encoders of unequal size, of some ten milliseconds each on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    config: ImageBindConfig = CONFIG
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
    config=replace(CONFIG, **{name: replace(getattr(CONFIG, name), layers=1, width=16) for name in MODALITIES}),
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
