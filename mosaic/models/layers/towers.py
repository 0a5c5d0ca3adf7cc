"""Encoders of one modality: patches or tokens, positions, blocks, and one vector or all tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.layers.block import Shape, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """How samples of one modality are cut into tokens: images, spectra, signals or videos, by the number of axes."""

    channels: int
    """Channels of a sample."""
    extent: tuple[int, ...]
    """Size of a sample along each axis."""
    patch: tuple[int, ...]
    """Size of a token along each axis."""
    stride: tuple[int, ...] | None = None
    """Distance of tokens along each axis; the patch's size by default."""
    norm: bool = False
    """Whether tokens are normed before positions are added (ImageBind's audio, depth, thermal, IMU)."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens along each axis."""
        strides = self.stride or self.patch
        return tuple(
            (extent - patch) // stride + 1
            for extent, patch, stride in zip(self.extent, self.patch, strides, strict=True)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of a sample."""
        return math.prod(self.grid)


def cut_patches(convolution: Any, x: Tensor) -> Tensor:
    """Applies a convolution without padding; where its patches do not overlap, as one matrix product of them.

    A product needs no cuDNN, which has refused streams of other contexts (pytorch#84309).

    Args:
        convolution: ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``.
        x: (batch, channels, ...).

    Returns:
        (batch, positions along each axis, width).
    """
    if convolution.kernel_size != convolution.stride:
        overlapping: Tensor = convolution(x).movedim(1, -1)
        return overlapping
    axes = range(2, x.dim())
    for axis, size in zip(reversed(axes), reversed(convolution.kernel_size), strict=True):
        x = x.narrow(axis, 0, x.shape[axis] // size * size).unflatten(axis, (-1, size))
    places = [2 * axis - 2 for axis in axes]
    patches = x.permute(0, *places, 1, *(place + 1 for place in places)).flatten(1 + len(places))
    return F.linear(patches, convolution.weight.flatten(1), convolution.bias)


class PatchTokens(nn.Module):
    """Cuts patches with a convolution, puts a class token in front where asked for, and adds learned positions."""

    def __init__(self, patches: Patches, width: int, *, class_token: bool, bias: bool = False) -> None:
        super().__init__()
        self.num_axes, self.extent = len(patches.extent), patches.extent
        convolution: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[self.num_axes]
        self.cut = convolution(patches.channels, width, patches.patch, patches.stride or patches.patch, bias=bias)
        self.norm = nn.LayerNorm(width) if patches.norm else nn.Identity()
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width)) if class_token else None
        self.positions = nn.Parameter(0.02 * torch.randn(patches.num_tokens + class_token, width))

    def forward(self, x: Tensor) -> Tensor:
        """Takes (batch, channels, ...), for videos also images (batch, channels, height, width), which stand still.

        Returns (batch, tokens, width).
        """
        if x.dim() == 4 and self.num_axes == 3:
            x = x.unsqueeze(2).expand(-1, -1, self.extent[0], -1, -1)
        tokens = self.norm(cut_patches(self.cut, x).flatten(1, -2))
        if self.class_token is not None:
            tokens = torch.cat((self.class_token.expand(len(x), -1, -1).to(tokens.dtype), tokens), dim=1)
        found: Tensor = tokens + self.positions
        return found


class PatchTower(nn.Module):
    """A transformer over patches.

    Args:
        patches: How a sample becomes tokens.
        shape: Dimensions of the blocks.
        out_width: Features that the result is projected to, without a bias; None for no projection.
        pooled: Whether the result is the class token's vector, (batch, out width), or all patches', (batch, tokens,
            out width); only in the first case there is a class token.
        first_norm: Whether there is a norm before the blocks (CLIP's and ImageBind's vision).
        head_dropout: Probability of dropout before the projection (ImageBind's IMU).
    """

    def __init__(
        self,
        patches: Patches,
        shape: Shape,
        out_width: int | None,
        *,
        pooled: bool = True,
        first_norm: bool = False,
        head_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = PatchTokens(patches, shape.width, class_token=pooled)
        self.first_norm = shape.make_norm() if first_norm else nn.Identity()
        self.stack = Stack(shape, last_norm=False)
        self.norm = shape.make_norm()
        self.dropout = nn.Dropout(head_dropout)
        self.project = nn.Identity() if out_width is None else nn.Linear(shape.width, out_width, bias=False)
        self.pooled = pooled

    def forward(self, x: Tensor) -> Tensor:
        """Takes a batch of samples; see the class for the result."""
        hidden = self.stack(self.first_norm(self.tokens(x)))
        found: Tensor = self.project(self.dropout(self.norm(hidden[:, 0] if self.pooled else hidden)))
        return found


class TokenTower(nn.Module):
    """A transformer over ids of a vocabulary.

    Args:
        vocabulary: Number of ids.
        num_tokens: Most tokens of a sample: so many positions are learned.
        shape: Dimensions of the blocks.
        out_width: Features that the result is projected to, without a bias; None for no projection.
        pooled: Whether the result is the vector of the end of the text, the token with the greatest id (CLIP), and
            attention looks back only; or all tokens', which see each other.
    """

    def __init__(
        self, vocabulary: int, num_tokens: int, shape: Shape, out_width: int | None, *, pooled: bool = True
    ) -> None:
        super().__init__()
        self.embedding = embedding(vocabulary, shape.width)
        self.positions = nn.Parameter(0.01 * torch.randn(num_tokens, shape.width))
        self.stack = Stack(shape)
        self.project = nn.Identity() if out_width is None else nn.Linear(shape.width, out_width, bias=False)
        self.pooled = pooled

    def forward(self, ids: Tensor) -> Tensor:
        """Takes (batch, tokens); returns (batch, out width), or (batch, tokens, out width)."""
        hidden = self.stack(self.embedding(ids) + self.positions[: ids.shape[1]], causal=self.pooled)
        if self.pooled:
            hidden = hidden[torch.arange(len(ids), device=ids.device), ids.argmax(dim=1)]
        found: Tensor = self.project(hidden)
        return found


def merge_neighbours(tokens: Tensor, count: int) -> Tensor:
    """Makes one token of so many, their mean; takes (batch, tokens, width), a multiple of ``count`` tokens."""
    return tokens if count == 1 else tokens.unflatten(1, (-1, count)).mean(dim=2)


def embedding(vocabulary: int, width: int) -> nn.Embedding:
    """Returns an embedding that starts small, as language models' do."""
    made = nn.Embedding(vocabulary, width)
    nn.init.normal_(made.weight, std=0.02)
    return made
