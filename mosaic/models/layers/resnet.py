"""A residual network without its last stage, as OFA and OFASys put it before their encoder (He et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

OUT_CHANNELS = 16
"""Channels of the result, in widths of the first stage."""
STRIDE = 16
"""Pixels along each side of one place of the result."""


class Bottleneck(nn.Module):
    """Three convolutions, the middle one over neighbours, added to what came in."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = _convolution(channels_in, width, 1, 1)
        self.spread = _convolution(width, width, 3, stride)
        self.expand = _convolution(width, 4 * width, 1, 1)
        fits = stride == 1 and channels_in == 4 * width
        self.pass_by = nn.Identity() if fits else _convolution(channels_in, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (batch, channels, height, width)."""
        hidden = self.expand(F.relu(self.spread(F.relu(self.reduce(x)))))
        return F.relu(hidden + self.pass_by(x))


class ResNet(nn.Module):
    """The stem and three stages.

    Args:
        blocks: Blocks of each stage: 3, 8, 36 for ResNet-152.
        width: Channels inside the first stage's blocks.
    """

    def __init__(self, blocks: Sequence[int], width: int = 64) -> None:
        super().__init__()
        self.stem = _convolution(3, width, 7, 2)
        self.stages = nn.ModuleList()
        channels = width
        for stage, count in enumerate(blocks):
            inside = width * 2**stage
            first = Bottleneck(channels, inside, 1 if stage == 0 else 2)
            channels = 4 * inside
            self.stages.append(nn.Sequential(first, *(Bottleneck(channels, inside, 1) for _ in range(count - 1))))

    def forward(self, x: Tensor) -> Tensor:
        """Takes images (batch, 3, height, width); returns (batch, 16 times the width, height / 16, width / 16)."""
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        for stage in self.stages:
            x = stage(x)
        return x


def _convolution(channels_in: int, channels_out: int, size: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out))
