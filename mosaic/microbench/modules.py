"""The two modules that ``overlap`` runs by default: a transformer and a stack of convolutions, of unequal kinds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mosaic.microbench.kernels import half_type
from mosaic.microbench.settings import Scale
from mosaic.profiler import Subject


@dataclass(frozen=True, slots=True)
class _Size:
    layers: int
    width: int
    heads: int
    tokens: int
    channels: int
    side: int
    batch: int


_SIZES: dict[Scale, _Size] = {
    "tiny": _Size(1, 16, 2, 8, 4, 8, 2),
    "host": _Size(2, 128, 4, 64, 32, 28, 8),
    "gpu": _Size(6, 768, 12, 197, 256, 56, 16),
}


def default_subjects(scale: Scale, device: torch.device, *, seed: int = 0) -> tuple[Subject, Subject]:
    """Returns two modules with inputs on a device, the same numbers for the same seed."""
    size, dtype = _SIZES[scale], half_type(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder: nn.Module = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(size.width, size.heads, 4 * size.width, dropout=0.0, batch_first=True)
                for _ in range(size.layers)
            )
        )
        convolutions: nn.Module = nn.Sequential(
            *(
                layer
                for _ in range(size.layers)
                for layer in (nn.Conv2d(size.channels, size.channels, 3, padding=1), nn.GELU())
            )
        )
        tokens = torch.randn(size.batch, size.tokens, size.width)
        image = torch.randn(size.batch, size.channels, size.side, size.side)
    encoder, convolutions = (module.to(device, dtype) for module in (encoder, convolutions))
    return (
        Subject("transformer", encoder, (tokens.to(device, dtype),), {}),
        Subject("convolutions", convolutions, (image.to(device, dtype),), {}),
    )
