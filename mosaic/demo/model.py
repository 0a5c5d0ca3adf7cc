"""A contrastive model of three modalities: images are the anchor that audio and text are drawn to.

After ImageBind (Girdhar et al. 2023): audio and text never meet in the loss, and agree nevertheless after training.
The encoders are unequal on purpose: in size, in sequence length and in kind.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """One pre-norm transformer block; shapes ``(batch, tokens, width)`` in and out."""

    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Attends over the tokens that ``keep`` (batch, 1, 1, tokens) allows, all where it is None."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=keep)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        change: Tensor = self.dropout(self.mlp(self.norm2(x)))
        return x + change


class ImageEncoder(nn.Module):
    """A small ViT over an 8 x 24 image: 12 patches of 4 x 4, seen through two convolutions."""

    def __init__(self, embedding: int = 64, width: int = 64, depth: int = 3, num_heads: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, width, 4, stride=4))
        self.position = nn.Parameter(0.3 * torch.randn(12, width))
        self.blocks = nn.ModuleList([Block(width, num_heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(12 * width)
        self.projection = nn.Linear(12 * width, embedding)

    def forward(self, image: Tensor) -> Tensor:
        """Embeds (batch, 1, 8, 24) to (batch, embedding)."""
        x = self.stem(image).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        embedding: Tensor = self.projection(self.norm(x.flatten(1)))
        return embedding


class AudioEncoder(nn.Module):
    """Strided convolutions over a log-mel spectrum, then a transformer, as in Whisper; with dropout."""

    def __init__(
        self, embedding: int = 64, width: int = 64, depth: int = 2, num_heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(40, width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.GELU(),
        )
        self.position = nn.Parameter(0.3 * torch.randn(24, width))
        self.blocks = nn.ModuleList([Block(width, num_heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(24 * width)
        self.projection = nn.Linear(24 * width, embedding)

    def forward(self, audio: Tensor) -> Tensor:
        """Embeds (batch, 40, 96) to (batch, embedding)."""
        x = self.stem(audio).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        embedding: Tensor = self.projection(self.norm(x.flatten(1)))
        return embedding


class TextEncoder(nn.Module):
    """A transformer over characters; token 0 is padding, and no attention goes to it."""

    def __init__(
        self,
        embedding: int = 64,
        width: int = 64,
        depth: int = 4,
        num_heads: int = 4,
        vocabulary: int = 29,
        length: int = 31,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.3 * torch.randn(length, width))
        self.blocks = nn.ModuleList([Block(width, num_heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(length * width)
        self.projection = nn.Linear(length * width, embedding)

    def forward(self, text: Tensor) -> Tensor:
        """Embeds (batch, characters) to (batch, embedding)."""
        real = text != 0
        x = self.embedding(text) + self.position
        for block in self.blocks:
            x = block(x, real[:, None, None, :])
        embedding: Tensor = self.projection(self.norm((x * real.unsqueeze(2)).flatten(1)))
        return embedding


class TriModal(nn.Module):
    """Embeds images, audio and text on one sphere."""

    def __init__(self, embedding: int = 64) -> None:
        super().__init__()
        self.image = ImageEncoder(embedding)
        self.audio = AudioEncoder(embedding)
        self.text = TextEncoder(embedding)
        # Softer than CLIP's 1 / 0.07: with small batches that one may stay for long where all embeddings are alike.
        self.logit_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, image: Tensor, audio: Tensor, text: Tensor) -> dict[str, Tensor]:
        """Returns ``image``, ``audio`` and ``text`` (batch, embedding), each row of length one, and ``scale``."""
        return {
            "image": F.normalize(self.image(image), dim=-1),
            "audio": F.normalize(self.audio(audio), dim=-1),
            "text": F.normalize(self.text(text), dim=-1),
            "scale": self.logit_scale.exp(),
        }


def contrastive_loss(features: dict[str, Tensor]) -> Tensor:
    """Symmetric InfoNCE of images with audio and of images with text, the other rows of the batch being wrong.

    Args:
        features: What ``TriModal`` returns; the rows of a batch must all differ in their meaning.

    Returns:
        The mean of the four cross entropies, a scalar.
    """
    target = torch.arange(len(features["image"]), device=features["image"].device)
    loss = torch.zeros((), device=target.device)
    for modality in ("audio", "text"):
        logits = features["scale"] * features["image"] @ features[modality].T
        loss = loss + F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)
    return loss / 4
