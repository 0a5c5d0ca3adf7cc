"""Data sets of a few sources for tests of the position stream; workers can import them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from mosaic.retrain.worker.loader import Samples
from mosaic.retrain.worker.positions import PositionStream, Source, samples_of

ROWS = {"new": 70, "old": 90, "older": 40}


class Rows(Dataset[Any]):
    """Says which row it is, and what it drew of every kind of random number, its own included."""

    def __init__(self, name: str, bad: dict[int, Exception] | None = None) -> None:
        self.first = 1000 * list(ROWS).index(name)
        self.rows = ROWS[name]
        self.bad = bad or {}
        self.rng = np.random.default_rng()
        self.asked = 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        self.asked += 1
        if row in self.bad:
            raise self.bad[row]
        noise = [float(np.random.normal()), random.gauss(0, 1), self.rng.normal()]
        return self.first + row, torch.cat([torch.randn(2), torch.tensor(noise)])


def stream(seed: int = 0) -> PositionStream:
    counts = samples_of({"new": ROWS["new"]}, {"old": ROWS["old"], "older": ROWS["older"]}, 0.3, 12_000)
    return PositionStream([Source(name=n, rows=ROWS[n], samples=count) for n, count in counts.items()], seed)


def samples(seed: int = 0, bad: dict[str, dict[int, Exception]] | None = None) -> Samples:
    return Samples([Rows(name, (bad or {}).get(name)) for name in ROWS], stream(seed))
