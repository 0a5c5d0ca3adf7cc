"""Factories as users name them on the command line, by this file's path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = Path(__file__)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
        self.right = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.left(a) + self.right(b)


def make(rows: int = 64) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Two(), {"a": torch.randn(rows, 32), "b": torch.randn(rows, 16)}


def make_small() -> tuple[nn.Module, Any]:
    return make(6)


def fails() -> None:
    raise RuntimeError("no data today")


def wrong() -> int:
    return 3


def nothing_to_place() -> tuple[nn.Module, Any]:
    return nn.Linear(4, 4), torch.randn(2, 4)


def loss_of_rows() -> tuple[nn.Module, Any, Any]:
    return *make(4), lambda output: output


def loss_of_no_kind() -> tuple[nn.Module, Any, Any]:
    return *make(4), 0.5


def narrow() -> tuple[nn.Module, Any]:
    return Two(), {"a": torch.randn(4, 31), "b": torch.randn(4, 16)}
