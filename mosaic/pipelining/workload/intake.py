"""How much of a microbatch a module reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mosaic.pipelining.workload.layer_steps import ModuleLoad
from mosaic.pipelining.workload.microbatch import Microbatch

WINDOW_S = 30.0
"""Seconds of audio that an encoder reads at once; shorter ones are padded, as Whisper's are."""

Unit = Literal["text", "image", "audio", "video"]
"""What a module's pieces are cut between: packed text is one, then images, windows of audio, clips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What a module reads of each modality, in tokens."""

    unit: Unit
    """What a microbatch is cut into; of ``text`` all modalities are one sequence."""
    text: bool = False
    """Whether it reads the text: as tokens, or across where its unit is another."""
    image_tokens: int = 0
    """Of an image."""
    window_tokens: int = 0
    """Of a window of audio."""
    video_tokens_per_s: float = 0.0
    """Of a second of video."""
    merges: int = 1
    """Tokens that leave it as one."""

    def units(self, microbatch: Microbatch) -> int:
        """Returns into how many pieces at most a microbatch is cut here."""
        if self.unit == "image":
            return microbatch.images
        if self.unit == "audio":
            return _windows(microbatch)
        if self.unit == "video":
            return microbatch.num_clips
        return 1 if self._packed(microbatch) else 0

    def load(self, microbatch: Microbatch, units: int) -> ModuleLoad:
        """Returns ``units`` of a microbatch's units.

        Raises:
            ValueError: There are not so many.
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
