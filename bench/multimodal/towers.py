"""Transformer towers: a stem that turns a modality into tokens, blocks, and a projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

Kind = Literal["ids", "image", "spectrum", "signal", "video", "boxes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """What one sample of a modality is, and how it becomes tokens."""

    kind: Kind
    """Which stem it needs."""
    shape: tuple[int, ...]
    """Of one sample, without the batch: ids (tokens), image (channels, height, width), spectrum (1, mels, frames),
    signal (axes, samples), video (channels, frames, height, width), boxes (number, 4)."""
    patch: tuple[int, ...] = ()
    """Extent of a token along each axis that is cut into patches."""
    vocabulary: int = 0
    """Number of different ids; 0 for what is no id."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a sample."""
        if self.kind in ("ids", "boxes"):
            return self.shape[0]
        count = 1
        for extent, step in zip(self.shape[1:], self.patch, strict=True):
            count *= extent // step
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSize:
    """Layers and widths of a tower."""

    layers: int
    """Blocks; 0 for an embedding alone."""
    width: int
    """Features of a token."""
    heads: int
    """Attention heads."""


class Stem(nn.Module):
    """Turns a batch of one modality into tokens with positions."""

    def __init__(self, modality: Modality, width: int) -> None:
        super().__init__()
        self.project: nn.Module
        patch, channels = modality.patch, modality.shape[0]
        if modality.kind == "ids":
            self.project = nn.Embedding(modality.vocabulary, width)
        elif modality.kind == "boxes":
            self.project = nn.Linear(4, width)
        elif modality.kind == "signal":
            self.project = nn.Conv1d(channels, width, patch, patch)
        elif modality.kind == "video":
            self.project = nn.Conv3d(channels, width, patch, patch)
        else:
            self.project = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(modality.num_tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes a batch of samples; returns (batch, tokens, width)."""
        tokens = self.project(x)
        if not isinstance(self.project, nn.Embedding | nn.Linear):
            tokens = tokens.flatten(2).transpose(1, 2)
        return tokens + self.position


class Block(nn.Module):
    """Attention and a perceptron, both after a norm and added to what came in."""

    def __init__(self, size: TowerSize, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = size.heads, causal
        self.before_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.before_perceptron = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns (batch, tokens, width)."""
        batch, tokens, width = x.shape
        parts = self.query_key_value(self.before_attention(x))
        query, key, value = parts.view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.before_perceptron(x))))


class Encoder(nn.Module):
    """A modality's tower: tokens of a common width, or one vector."""

    def __init__(self, modality: Modality, size: TowerSize, out_width: int, *, pooled: bool, causal: bool) -> None:
        super().__init__()
        self.stem = Stem(modality, size.width)
        self.blocks = nn.ModuleList(Block(size, causal=causal) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.project = nn.Linear(size.width, out_width, bias=False)
        self.pooled = pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes a batch of samples; returns (batch, tokens, out width), or (batch, out width) where pooled."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.project(x.mean(dim=1) if self.pooled else x)


class Trunk(nn.Module):
    """Blocks over tokens that are there already: a backbone or a decoder."""

    def __init__(self, in_width: int, size: TowerSize, out_width: int, *, causal: bool) -> None:
        super().__init__()
        self.enter = nn.Identity() if in_width == size.width else nn.Linear(in_width, size.width)
        self.blocks = nn.ModuleList(Block(size, causal=causal) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Identity() if out_width == size.width else nn.Linear(size.width, out_width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes (batch, tokens, in width); returns (batch, tokens, out width)."""
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
