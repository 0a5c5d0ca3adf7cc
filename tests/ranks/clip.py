"""A small model of three towers for loops on two ranks, its batches, and what an attempt is told."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from mosaic.errors import MosaicError

ROWS = (3, 2)
MEMBERS = {"image": (0,), "text": (0, 1), "audio": (1,), "head": (0, 1)}


class Clip(nn.Module):
    """Three towers, a head on what they make, and parameters between them; audio may be missing."""

    def __init__(self, dropout: float = 0.0, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, 8))
        self.text = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(24, 8))
        self.audio = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, audio: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        seen, read = self.image(image), self.text(text)
        heard = torch.zeros_like(seen) if audio is None else self.audio(audio)
        return {
            "image": functional.normalize(seen, dim=-1),
            "text": functional.normalize(read, dim=-1),
            "audio": heard,
            "logits": self.head(seen + read + heard),
            "scale": self.logit_scale.exp(),
        }


def batch_of(step: int, rank: int, rows: tuple[int, ...] = ROWS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    total, part = sum(rows), slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    return {
        "image": torch.randn(total, 6, generator=generator)[part],
        "text": torch.randint(0, 11, (total, 3), generator=generator)[part],
        "audio": torch.randn(total, 4, generator=generator)[part],
    }


def mean_loss(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return out["logits"].square().mean() + (out["image"] * out["text"]).sum(-1).mean() * out["scale"]


def told(attempt: Callable[[], object], kind: type[Exception] = MosaicError) -> str:
    try:
        attempt()
    except kind as error:
        return str(error)
    return "nothing"
