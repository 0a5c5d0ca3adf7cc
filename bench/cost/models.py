"""Eight modules with different memory traffic, and a model of several of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Size = Literal["tiny", "host", "gpu"]
"""Sizes for tests, for a few cores, and for a GPU like an H100."""
NAMES = ("text", "points", "image", "tables", "audio", "depth", "video", "thermal")
"""All modules, alternately bound by arithmetic and by traffic; a model of n has the first n."""


@dataclass(frozen=True, slots=True)
class _Width:
    batch: int
    layers: int
    width: int
    tokens: int
    channels: int
    side: int
    weights: int
    spread: int


_WIDTHS: dict[Size, _Width] = {
    "tiny": _Width(8, 1, 16, 8, 4, 8, 32, 256),
    "host": _Width(16, 2, 96, 32, 12, 24, 1536, 65_536),
    "gpu": _Width(32, 6, 768, 196, 128, 56, 8192, 4_194_304),
}


class Recurrent(nn.Module):
    """A GRU that returns only its states; input and output are ``(batch, tokens, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.cells(x)[0]
        return states


class Pointwise(nn.Module):
    """Elementwise operations on wide rows, ``(batch, spread)``: traffic with little arithmetic."""

    def __init__(self, spread: int, layers: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(spread)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.relu(x * scale + 1.0)
        return x


def _transformer(width: int, layers: int) -> nn.Module:
    layer = [nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers)]
    return nn.Sequential(*layer)


def _convolutions(channels: int, layers: int) -> nn.Module:
    return nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Conv2d(channels, channels, 3, padding=1), nn.GELU()))
    )


def _parts(size: Size) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Constructor and input shape of each module."""
    s = _WIDTHS[size]
    wide = (s.batch, s.spread)
    layers = range(s.layers)
    return {
        "text": (lambda: _transformer(s.width, s.layers), (s.batch, s.tokens, s.width)),
        "points": (lambda: Pointwise(s.spread, 2 * s.layers), wide),
        "image": (lambda: _convolutions(s.channels, s.layers), (s.batch, s.channels, s.side, s.side)),
        "tables": (lambda: nn.Sequential(*(nn.Linear(s.weights, s.weights) for _ in layers)), (s.batch, s.weights)),
        "audio": (lambda: Recurrent(s.width), (s.batch, s.tokens, s.width)),
        "depth": (lambda: nn.Sequential(*(nn.LayerNorm(s.spread) for _ in layers)), wide),
        "video": (
            lambda: _convolutions(2 * s.channels, s.layers),
            (s.batch, 2 * s.channels, s.side // 2, s.side // 2),
        ),
        "thermal": (lambda: _transformer(2 * s.width, max(1, s.layers // 2)), (s.batch, s.tokens, 2 * s.width)),
    }


class Branches(nn.Module):
    """A model of independent modules with reproducible weights; returns the sum of their means."""

    def __init__(self, names: Sequence[str], size: Size) -> None:
        super().__init__()
        parts = _parts(size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.branches = nn.ModuleDict({name: parts[name][0]() for name in names})

    def forward(self, **inputs: Tensor) -> Tensor:
        means = [module(inputs[name]).float().mean() for name, module in self.branches.items()]
        return torch.stack(means).sum()


def make_inputs(names: Sequence[str], size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns reproducible inputs for the named modules."""
    source, parts = torch.Generator().manual_seed(1), _parts(size)
    return {name: torch.randn(parts[name][1], generator=source).to(device, dtype) for name in names}
