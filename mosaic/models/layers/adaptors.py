"""OFASys's adaptors: what brings a modality's samples to the width of the shared encoder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.layers.block import Shape, Stack
from mosaic.models.layers.resnet import OUT_CHANNELS, ResNet
from mosaic.models.layers.towers import Patches, cut_patches, merge_neighbours


class Adaptor(nn.Module):
    """A stem, learned positions, and blocks of its own where the model has them.

    Args:
        stem: Turns samples into (batch, tokens, width); ``nn.Identity()`` for what is embedded already.
        num_tokens: Tokens of a sample.
        shape: Of its blocks; 0 layers for none, as published.
        merged: Neighbouring tokens whose mean is one of the result; 1 as published.
    """

    def __init__(self, stem: nn.Module, num_tokens: int, shape: Shape, merged: int = 1) -> None:
        super().__init__()
        self.merged = merged
        self.stem = stem
        self.norm = shape.make_norm()
        self.positions = nn.Parameter(0.02 * torch.randn(num_tokens, shape.width))
        self.stack = Stack(shape, last_norm=shape.layers > 0)

    def forward(self, samples: Tensor) -> Tensor:
        """Takes a batch of samples; returns (batch, tokens / merged, width)."""
        tokens = self.norm(self.stem(samples))
        return merge_neighbours(self.stack(tokens + self.positions[: tokens.shape[1]]), self.merged)


class PatchStem(nn.Module):
    """Patches of an image or a video."""

    def __init__(self, patches: Patches, width: int) -> None:
        super().__init__()
        kind: Any = {2: nn.Conv2d, 3: nn.Conv3d}[len(patches.extent)]
        self.cut = kind(patches.channels, width, patches.patch, patches.patch)

    def forward(self, x: Tensor) -> Tensor:
        """Takes (batch, channels, ...); returns (batch, patches, width)."""
        return cut_patches(self.cut, x).flatten(1, -2)


class ResNetStem(nn.Module):
    """A residual network over an image, or over each frame of a video, of whose places one vector is left a frame."""

    def __init__(self, network: ResNet, network_width: int, width: int) -> None:
        super().__init__()
        self.network = network
        self.project = nn.Linear(OUT_CHANNELS * network_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes (batch, 3, height, width) or (batch, 3, frames, height, width); returns (batch, tokens, width)."""
        if x.dim() == 4:
            found: Tensor = self.project(self.network(x).flatten(2).transpose(1, 2))
            return found
        frames = self.network(x.transpose(1, 2).flatten(0, 1)).mean(dim=(2, 3))
        one_a_frame: Tensor = self.project(frames).unflatten(0, (len(x), -1))
        return one_a_frame


class SpectrumStem(nn.Module):
    """Two convolutions that halve time and bands each, and a projection: a quarter of the frames are left."""

    def __init__(self, mels: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, 2, 1)
        self.second = nn.Conv2d(width, width, 3, 2, 1)
        self.project = nn.Linear(width * (mels // 4), width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes (batch, 1, mel bands, frames); returns (batch, frames / 4, width)."""
        hidden = F.relu(self.second(F.relu(self.first(x))))
        found: Tensor = self.project(hidden.permute(0, 3, 1, 2).flatten(2))
        return found


def motion_stem(features: int, width: int) -> nn.Module:
    """Returns a perceptron of two layers over each step of a motion."""
    return nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width))
