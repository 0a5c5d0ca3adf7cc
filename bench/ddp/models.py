"""The models of the study: large towers that can be distributed over ranks, and models without a gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import nn

from bench.loops import Workload
from mosaic.models import build, loss_of, make_batch


class TwoTowers(nn.Module):
    """Two towers and a product of their results."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Returns the product of the towers' results per row."""
        return (self.left(a) * self.right(b)).mean(-1)


class Contrasted(nn.Module):
    """An image and a text tower with a similarity matrix, as in CLIP."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.words = nn.Embedding(words, width)
        self.image, self.text = (_transformer(width, layers) for _ in range(2))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Returns the similarity of each image and text of the rank's batch."""
        seen = self.image(self.patches(images).flatten(2).mT).mean(1)
        read = self.text(self.words(texts)).mean(1)
        return nn.functional.normalize(seen, dim=-1) @ nn.functional.normalize(read, dim=-1).T / 0.07


def _transformer(width: int, layers: int) -> nn.Module:
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(block, layers, enable_nested_tensor=False)


def _linear_towers(batch: torch.Generator, *, width: int = 1600, layers: int = 10, rows: int = 8) -> Workload:
    def tower() -> nn.Module:
        linears = [nn.Linear(width, width) for _ in range(layers)]
        for linear in linears:  # avoids vanishing gradients, whose AdamW steps have random signs
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        return nn.Sequential(*(part for linear in linears for part in (linear, nn.ReLU())))

    inputs = {name: torch.randn(rows, width, generator=batch) for name in "ab"}
    return Workload(TwoTowers(tower(), tower()), inputs, _square)


def _embedding_bags(batch: torch.Generator, *, words: int = 100_000, width: int = 256, rows: int = 32) -> Workload:
    def tower() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(words, width), nn.Linear(width, 64))

    inputs = {name: torch.randint(0, words, (rows, 16), generator=batch) for name in "ab"}
    return Workload(TwoTowers(tower(), tower()), inputs, _square)


def _clip_like(batch: torch.Generator, *, width: int = 384, layers: int = 4, words: int = 30_000) -> Workload:
    images = torch.randn(8, 3, 64, 64, generator=batch)
    texts = torch.randint(0, words, (8, 32), generator=batch)
    return Workload(Contrasted(width, layers, words), {"images": images, "texts": texts}, _contrast)


def _one_sided(batch: torch.Generator) -> Workload:
    def convolutions(*widths: int) -> nn.Module:
        pairs = pairwise(widths)
        return nn.Sequential(*(part for a, b in pairs for part in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())))

    images = nn.Sequential(convolutions(3, 64, 64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    inputs = {"a": torch.randn(8, 3, 32, 32, generator=batch), "b": torch.randn(8, 64, generator=batch)}
    return Workload(TwoTowers(images, nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))), inputs, _square)


def _tiny_clip(batch: torch.Generator) -> Workload:
    return Workload(build("clip", "tiny"), make_batch("clip", "tiny", batch=8, seed=batch.initial_seed()), loss_of)


def _square(results: torch.Tensor) -> torch.Tensor:
    return results.square().mean()


def _contrast(likeness: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(likeness, torch.arange(len(likeness)))


MODELS: Mapping[str, Callable[[torch.Generator], Workload]] = MappingProxyType(
    {
        "two linear towers": _linear_towers,
        "two embedding bags": _embedding_bags,
        "a CLIP of two transformers": _clip_like,
        "convolutions beside a small tower": _one_sided,
        "CLIP, tiny": _tiny_clip,
    }
)
"""Models by name, by size of gradients; the last two have small gradients, so there is nothing to gain."""


def make(name: str, rank: int) -> Workload:
    """Creates a model with the same weights on all ranks, and the rank's batch."""
    torch.manual_seed(0)
    return MODELS[name](torch.Generator().manual_seed(1 + rank))
