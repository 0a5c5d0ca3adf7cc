"""Metadata of a microbatch for planning: its amount of each modality."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Content of one microbatch.

    Raises:
        ValueError: A figure is negative or not finite, a count is not whole, or all are 0.
    """

    text_tokens: int = 0
    """Tokens of text, without those of other modalities."""
    images: int = 0
    """Images."""
    audio_s: float = 0.0
    """Seconds of audio."""
    video_s: float = 0.0
    """Seconds of video."""
    clips: int = 0
    """Equally long clips of the video; 0: one, if it has video."""

    def __post_init__(self) -> None:
        for name in ("text_tokens", "images", "clips"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"microbatch: {name}={value!r}; use a whole number, 0 or more")
        for name in ("audio_s", "video_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:  # also catches NaN
                raise ValueError(f"microbatch: {name}={value!r}; use a finite number of seconds, 0 or more")
        if not (self.text_tokens or self.images or self.audio_s or self.video_s):
            raise ValueError("a microbatch without text, images, audio or video; give it some of any, or leave it out")
        if self.clips and not self.video_s:
            raise ValueError(f"microbatch: clips={self.clips} without video; give video_s too")

    @property
    def num_clips(self) -> int:
        """Clips, 0 without video."""
        return self.clips or (1 if self.video_s else 0)
