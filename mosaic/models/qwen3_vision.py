"""Qwen3-VL's vision tower: patches over two frames, merged two by two, and features of inner layers beside."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.layers.attention import Rotary, grid_positions
from mosaic.models.layers.block import Shape, Stack
from mosaic.models.layers.towers import cut_patches

MERGE = 2
"""Patches along each side that become one token of the language model."""
FRAMES = 2
"""Frames of a patch; an image stands still for so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Dimensions of the tower."""

    shape: Shape
    """Of its blocks."""
    patch: int
    """Height and width of a patch."""
    side: int
    """Learned positions along each side; stretched to the grid of an image."""
    out_width: int
    """Width of the language model."""
    deepstack: tuple[int, ...]
    """Blocks after which features are taken for the language model's first blocks."""

    def tiny(self, out_width: int) -> VisionConfig:
        """Returns the same kind of tower, small: features are taken after its first block."""
        shape = self.shape.tiny()
        return replace(self, shape=shape, patch=8, side=3, out_width=out_width, deepstack=(0,))

    def tokens(self, px: int) -> int:
        """Returns the language model's tokens of an image of so many pixels a side."""
        return (px // self.patch // MERGE) ** 2


class Merger(nn.Module):
    """Turns windows of patches into tokens; the norm is over a patch, or over the window where ``whole``."""

    def __init__(self, width: int, out_width: int, *, whole: bool) -> None:
        super().__init__()
        inside = width * MERGE**2
        self.whole = whole
        self.norm = nn.LayerNorm(inside if whole else width, eps=1e-6)
        self.up = nn.Linear(inside, inside)
        self.down = nn.Linear(inside, out_width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Takes (batch, patches, width), window after window; returns (batch, patches / 4, out width)."""
        windows = hidden if self.whole else self.norm(hidden)
        windows = windows.unflatten(1, (-1, MERGE**2)).flatten(2)
        found: Tensor = self.down(F.gelu(self.up(self.norm(windows) if self.whole else windows)))
        return found


class VisionTower(nn.Module):
    """A vision transformer; each pair of frames sees itself only.

    Args:
        config: Its dimensions.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        self.cut = nn.Conv3d(3, shape.width, (FRAMES, config.patch, config.patch), (FRAMES, config.patch, config.patch))
        self.positions = nn.Parameter(0.02 * torch.randn(config.side**2, shape.width))
        self.rotary = Rotary(shape.width // shape.heads, layout="grid")
        self.stack = Stack(shape, last_norm=False)
        self.merger = Merger(shape.width, config.out_width, whole=False)
        self.deepstack = nn.ModuleList(Merger(shape.width, config.out_width, whole=True) for _ in config.deepstack)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Takes images (batch, 3, height, width) or videos (batch, 3, frames, height, width).

        Sides are multiples of two patches, frames of two.

        Returns:
            (batch, tokens, out width), frame by frame, row by row; and as much for each of the config's ``deepstack``.
        """
        if x.dim() == 4:
            x = x.unsqueeze(2).expand(-1, -1, FRAMES, -1, -1)
        patches = cut_patches(self.cut, x)
        batch, frames, rows, columns, _ = patches.shape
        order = _window_order(rows, columns, x.device)
        hidden = patches.flatten(2, 3).flatten(0, 1) + self._stretched(rows, columns)
        hidden = hidden.index_select(1, order)
        angles = self.rotary(grid_positions(rows, columns, x.device).index_select(0, order))
        inner: list[Tensor] = []
        for index, block in enumerate(self.stack.blocks):
            hidden = block(hidden, angles=angles)
            if index in self.config.deepstack:
                inner.append(self.deepstack[len(inner)](hidden).unflatten(0, (batch, frames)).flatten(1, 2))
        return self.merger(hidden).unflatten(0, (batch, frames)).flatten(1, 2), tuple(inner)

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """Returns the learned positions for a grid, (rows * columns, width), between four neighbours each."""
        side = self.config.side
        grid = self.positions.t().reshape(1, -1, side, side)
        return F.interpolate(grid, (rows, columns), mode="bilinear", align_corners=True).flatten(2)[0].t()


def _window_order(rows: int, columns: int, device: torch.device) -> Tensor:
    """Returns the indices of patches, window after window."""
    index = torch.arange(rows * columns, device=device).view(rows // MERGE, MERGE, columns // MERGE, MERGE)
    return index.transpose(1, 2).flatten()
