"""Eight modules of different kinds and appetites for memory bandwidth, and a model of some of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Size = Literal["tiny", "host", "gpu"]
"""For tests, for a few cores, and for a GPU of the H100's class."""


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
    """A GRU that gives its states alone."""

    def __init__(self, width: int) -> None:
        """Makes it."""
        super().__init__()
        self.cells = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes ``(batch, tokens, width)`` in and out."""
        states: Tensor = self.cells(x)[0]
        return states


class Pointwise(nn.Module):
    """Elementwise operations on wide rows: all traffic, hardly any arithmetic."""

    def __init__(self, spread: int, layers: int) -> None:
        """Makes one scale a layer."""
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(spread)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes ``(batch, spread)`` in and out."""
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


def _parts(s: _Width) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """What makes each module, and the shape of its input."""
    rows = (s.batch, s.tokens, s.width)
    image = (s.batch, s.channels, s.side, s.side)
    video = (s.batch, 2 * s.channels, s.side // 2, s.side // 2)
    wide = (s.batch, s.spread)
    return {
        "text": (lambda: _transformer(s.width, s.layers), rows),
        "points": (lambda: Pointwise(s.spread, 2 * s.layers), wide),
        "image": (lambda: _convolutions(s.channels, s.layers), image),
        "tables": (
            lambda: nn.Sequential(*(nn.Linear(s.weights, s.weights) for _ in range(s.layers))),
            (s.batch, s.weights),
        ),
        "audio": (lambda: Recurrent(s.width), rows),
        "depth": (lambda: nn.Sequential(*(nn.LayerNorm(s.spread) for _ in range(s.layers))), wide),
        "video": (lambda: _convolutions(2 * s.channels, s.layers), video),
        "thermal": (lambda: _transformer(2 * s.width, max(1, s.layers // 2)), (s.batch, s.tokens, 2 * s.width)),
    }


def make_module(name: str, size: Size) -> nn.Module:
    """Returns one of ``NAMES``."""
    return _parts(_WIDTHS[size])[name][0]()


def input_shape(name: str, size: Size) -> tuple[int, ...]:
    """Returns the shape of a module's input."""
    return _parts(_WIDTHS[size])[name][1]


NAMES = ("text", "points", "image", "tables", "audio", "depth", "video", "thermal")
"""All modules, arithmetic and traffic in turn; a model of n has the first n."""


class Branches(nn.Module):
    """Modules that all could run at the same time, and the sum of what they give."""

    def __init__(self, names: Sequence[str], size: Size) -> None:
        """Makes the named modules with the same weights each time."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.branches = nn.ModuleDict({name: make_module(name, size) for name in names})

    def forward(self, **inputs: Tensor) -> Tensor:
        """Calls every module on the input of its name; a loss."""
        found = [module(inputs[name]).float().mean() for name, module in self.branches.items()]
        return torch.stack(found).sum()


def make_inputs(names: Sequence[str], size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns an input for each of the named modules, the same each time."""
    source = torch.Generator().manual_seed(1)
    shapes = {name: input_shape(name, size) for name in names}
    return {name: torch.randn(shape, generator=source).to(device, dtype) for name, shape in shapes.items()}
