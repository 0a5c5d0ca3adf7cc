"""A contrastive model of three modalities: images are the anchor that audio and text are drawn to.

After ImageBind (Girdhar et al. 2023): audio and text never meet in the loss, and agree nevertheless after training.
The encoders are unequal on purpose: in size, in sequence length and in kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EMBEDDING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Channels and blocks of the image encoder, channels of a recurrent encoder's direction, and training."""

    width: int
    depth: int
    hidden: int
    batch_size: int
    learning_rate: float


SIZES = {
    "host": Size(width=64, depth=3, hidden=96, batch_size=48, learning_rate=2e-3),
    # Some 0.8 TFLOP a step: an H100 is bound by kernels, not by their launches, and the recurrent encoders, whose time
    # steps follow one another, leave most of its SMs idle.
    "cuda": Size(width=384, depth=8, hidden=384, batch_size=512, learning_rate=5e-4),
}


class ImageEncoder(nn.Module):
    """A small ViT over an 8 x 24 image: 12 patches of 4 x 4, seen through two convolutions."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, width, 4, stride=4))
        self.position = nn.Parameter(0.3 * torch.randn(12, width))
        heads, settings = max(4, width // 64), {"dropout": 0.0, "activation": "gelu", "norm_first": True}
        blocks = (
            nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True, **settings)  # type: ignore[arg-type]
            for _ in range(depth)
        )
        self.blocks = nn.Sequential(*blocks)
        self.projection = nn.Sequential(nn.LayerNorm(12 * width), nn.Linear(12 * width, EMBEDDING))

    def forward(self, image: Tensor) -> Tensor:
        """Embeds (batch, 1, 8, 24) to (batch, EMBEDDING)."""
        x = self.blocks(self.stem(image).flatten(2).transpose(1, 2) + self.position)
        return cast(Tensor, self.projection(x.flatten(1)))


class AudioEncoder(nn.Module):
    """Convolutions over a log-mel spectrum, then a bidirectional GRU, as speech recognisers have; with dropout."""

    def __init__(self, hidden: int, width: int = 64) -> None:
        super().__init__()
        first, second = nn.Conv1d(40, width, 5, stride=2, padding=2), nn.Conv1d(width, width, 5, padding=2)
        self.stem = nn.Sequential(first, nn.GELU(), second, nn.GELU())
        self.norm = nn.LayerNorm(width)
        self.recurrent = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        self.projection = nn.Sequential(nn.Dropout(0.1), nn.Linear(3 * 2 * hidden, EMBEDDING))

    def forward(self, audio: Tensor) -> Tensor:
        """Embeds (batch, 40, 96) to (batch, EMBEDDING)."""
        x, _ = self.recurrent(self.norm(self.stem(audio).transpose(1, 2)))
        thirds = x.unflatten(1, (3, -1)).mean(2).flatten(1)  # three words, one after the other
        return cast(Tensor, self.projection(thirds))


class TextEncoder(nn.Module):
    """A bidirectional GRU over characters; token 0 is padding, and is left out of the mean."""

    def __init__(self, hidden: int, width: int = 64, vocabulary: int = 29) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        self.projection = nn.Linear(2 * hidden, EMBEDDING)

    def forward(self, text: Tensor) -> Tensor:
        """Embeds (batch, characters) to (batch, EMBEDDING)."""
        real = (text != 0).unsqueeze(2)
        x, _ = self.recurrent(self.embedding(text) * real)
        return cast(Tensor, self.projection((x * real).sum(1) / real.sum(1)))


class TriModal(nn.Module):
    """Embeds images, audio and text on one sphere."""

    def __init__(self, size: Size = SIZES["host"]) -> None:
        super().__init__()
        self.image = ImageEncoder(size.width, size.depth)
        self.audio = AudioEncoder(size.hidden)
        self.text = TextEncoder(size.hidden)
        # Softer than CLIP's 1 / 0.07, with which small batches may stay long at equal embeddings.
        self.logit_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, image: Tensor, audio: Tensor, text: Tensor) -> dict[str, Tensor]:
        """Returns ``image``, ``audio`` and ``text`` (batch, EMBEDDING), each row of length one, and ``scale``."""
        return {
            "image": F.normalize(self.image(image), dim=-1),
            "audio": F.normalize(self.audio(audio), dim=-1),
            "text": F.normalize(self.text(text), dim=-1),
            "scale": self.logit_scale.exp(),
        }


def contrastive_loss(features: dict[str, Tensor]) -> Tensor:
    """Returns the mean symmetric InfoNCE of images with audio and of images with text.

    The other rows of the batch are the wrong answers, so all rows must differ in their meaning.
    """
    target = torch.arange(len(features["image"]), device=features["image"].device)
    loss = torch.zeros((), device=target.device)
    for modality in ("audio", "text"):
        logits = features["scale"] * features["image"] @ features[modality].T
        loss = loss + F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)
    return loss / 4
