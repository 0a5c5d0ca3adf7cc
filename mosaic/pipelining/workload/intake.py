"""The part of a microbatch that a module reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mosaic.pipelining.workload.layer_steps import ModuleLoad
from mosaic.pipelining.workload.microbatch import Microbatch

WINDOW_S = 30.0
"""Seconds of audio in a window; shorter windows are padded, as in Whisper."""

Unit = Literal["text", "image", "audio", "video"]
"""Unit of a module's pieces: packed text as one, images, windows of audio, or clips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Tokens that a module reads of each modality."""

    unit: Unit
    """Unit of pieces; with ``text`` all modalities are one sequence."""
    text: bool = False
    """True if it reads the text: as tokens, or by cross attention with another unit."""
    image_tokens: int = 0
    """Tokens of an image."""
    window_tokens: int = 0
    """Tokens of a window of audio."""
    video_tokens_per_s: float = 0.0
    """Tokens of a second of video."""
    merges: int = 1
    """Number of tokens merged into one output."""

    def units(self, microbatch: Microbatch) -> int:
        """Returns the most pieces of a microbatch here."""
        if self.unit == "image":
            return microbatch.images
        if self.unit == "audio":
            return _windows(microbatch)
        if self.unit == "video":
            return microbatch.num_clips
        return 1 if self._packed(microbatch) else 0

    def load(self, microbatch: Microbatch, units: int) -> ModuleLoad:
        """Returns the load of ``units`` of a microbatch's units.

        Raises:
            ValueError: The microbatch has fewer.
        """
        most = self.units(microbatch)
        if not 1 <= units <= most:
            raise ValueError(f"units={units} of a microbatch that has {most} ({self.unit}); use 1 to {most}")
        if self.unit == "text":
            return ModuleLoad(sequences=1, tokens=self._packed(microbatch))
        if self.unit == "video":
            tokens = max(1, round(self.video_tokens_per_s * microbatch.video_s / most))
            context = -(-microbatch.text_tokens // most) if self.text else 0
            return ModuleLoad(sequences=units, tokens=tokens, context=context)
        tokens = self.image_tokens if self.unit == "image" else self.window_tokens
        return ModuleLoad(sequences=units, tokens=tokens, outputs=-(-tokens // self.merges))

    def _packed(self, microbatch: Microbatch) -> int:
        return (
            (microbatch.text_tokens if self.text else 0)
            + self.image_tokens * microbatch.images
            + self.window_tokens * _windows(microbatch)
            + round(self.video_tokens_per_s * microbatch.video_s)
        )


def _windows(microbatch: Microbatch) -> int:
    return math.ceil(microbatch.audio_s / WINDOW_S)
