"""A model of three towers, a backbone and a head for loops on several ranks, its batches and its loss."""

from __future__ import annotations

import torch
from torch import nn


class Model(nn.Module):
    """Three towers with glue on each, a backbone over all of them and a head; the third input may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 8))
        self.text = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh())
        self.audio = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.mix = nn.Parameter(torch.randn(8, 8) / 3)
        self.backbone = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, image: torch.Tensor, text: torch.Tensor, audio: torch.Tensor | None) -> dict[str, torch.Tensor]:
        seen = self.image(image) @ self.mix
        read = self.text(text).mean(1)
        if audio is not None:
            read = read + self.audio(audio)
        return {"logits": self.head(self.backbone(torch.cat([seen, read], dim=-1))), "seen": seen}


def batch(step: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "image": torch.randn(rows, 6, generator=generator),
        "text": torch.randint(0, 11, (rows, 5), generator=generator),
        "audio": torch.randn(rows, 4, generator=generator),
    }


def loss_of(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return out["logits"].square().mean() + out["seen"].abs().mean() * 0.1
