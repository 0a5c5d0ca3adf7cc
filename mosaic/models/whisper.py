"""Whisper's encoder of speech (Radford et al. 2022), with the pooling that Qwen-Audio puts after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.layers.block import Shape, Stack


class WhisperEncoder(nn.Module):
    """Two convolutions over time, sinusoids, blocks; then each two tokens become one.

    Args:
        mels: Mel bands of a spectrum.
        frames: Its frames, a multiple of four.
        shape: Of the blocks.
        out_width: Features that the result is projected to.
    """

    positions: Tensor

    def __init__(self, mels: int, frames: int, shape: Shape, out_width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(mels, shape.width, 3, 1, 1)
        self.second = nn.Conv1d(shape.width, shape.width, 3, 2, 1)
        self.register_buffer("positions", _sinusoids(frames // 2, shape.width), persistent=False)
        self.stack = Stack(shape)
        self.project = nn.Linear(shape.width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes log-mel spectra (batch, 1, mel bands, frames); returns (batch, frames / 4, out width)."""
        tokens = F.gelu(self.second(F.gelu(self.first(x.squeeze(1))))).transpose(1, 2)
        hidden = self.stack(tokens + self.positions[: tokens.shape[1]])
        found: Tensor = self.project(F.avg_pool1d(hidden.transpose(1, 2), 2).transpose(1, 2))
        return found


def _sinusoids(tokens: int, width: int) -> Tensor:
    frequencies = 10_000.0 ** -(torch.arange(width // 2, dtype=torch.float32) / (width // 2 - 1))
    angles = torch.arange(tokens, dtype=torch.float32).unsqueeze(1) * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)
