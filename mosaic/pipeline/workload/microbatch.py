"""Metadata of a microbatch: how much of each modality it has. All that planning a step needs to know of its data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """What one microbatch holds.

    Raises:
        ValueError: A figure is negative or not finite, or there is nothing of any modality.
    """

    text_tokens: int = 0
    """Tokens of text, without those of other modalities."""
    images: int = 0
    """Images."""
    audio_s: float = 0.0
    """Seconds of audio."""
    video_s: float = 0.0
    """Seconds of video."""
