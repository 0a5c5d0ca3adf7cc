"""A model of three towers, a backbone and a head for loops on several ranks, its batches and its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from mosaic.errors import MosaicError

MEMBERS = {"image": (0,), "text": (0, 1), "audio": (1,), "backbone": (1,), "head": (0, 1)}
"""Ranks of the modules, on two."""


class Model(nn.Module):
    """Three towers, glue with parameters, a backbone over all of them and a head; audio may be missing."""

    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 8))
        self.text = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh())
        self.audio = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.mix = nn.Parameter(torch.randn(8, 8) / 3)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.backbone = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8))
        self.head = nn.Linear(8, 3)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, audio: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        seen, read = self.image(image) @ self.mix, self.text(text).mean(1)
        heard = torch.zeros_like(read) if audio is None else self.audio(audio)
        return {
            "image": functional.normalize(seen, dim=-1),
            "text": functional.normalize(read, dim=-1),
            "audio": heard,
            "logits": self.head(self.backbone(torch.cat([seen, read + heard], dim=-1))),
            "seen": seen,
            "scale": self.logit_scale.exp(),
        }


def batch(step: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "image": torch.randn(rows, 6, generator=generator),
        "text": torch.randint(0, 11, (rows, 5), generator=generator),
        "audio": torch.randn(rows, 4, generator=generator),
    }


def batch_of(step: int, rank: int, rows: tuple[int, ...] = (3, 2)) -> dict[str, torch.Tensor]:
    """Returns a rank's rows of a global batch."""
    return {name: tensor.split(rows)[rank] for name, tensor in batch(step, sum(rows)).items()}


def loss_of(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return out["logits"].square().mean() + out["seen"].abs().mean() * out["scale"] * 0.1


def told(attempt: Callable[[], object], kind: type[Exception] = MosaicError) -> str:
    """Returns what an attempt is told."""
    try:
        attempt()
    except kind as error:
        return str(error)
    return "nothing"
