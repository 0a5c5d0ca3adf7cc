"""What a day's loop does beside a user's steps, piece by piece: on one rank, and what two tell each other."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

from bench.record import Figure, median_figure
from mosaic.lines import append_line
from mosaic.train.crew import Crew
from mosaic.train.data.positions import PositionStream, Source
from mosaic.train.data.samples import Samples
from mosaic.train.data.seeds import seed_step

_CPU = torch.device("cpu")


class _Numbers(Dataset[int]):
    """Rows that cost nothing."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> int:
        return index


def pieces(*, calls: int = 300) -> Iterator[Figure]:
    """Measures pieces of one rank's step."""
    numbers = _Numbers()
    stream = PositionStream([Source(name="new", rows=len(numbers), share=1, digest="")], seed=0)  # type: ignore[arg-type]
    samples = Samples([numbers], stream)
    crew, losses = Crew(_CPU), [torch.tensor(1.0)]
    row = {"step": 1000, "loss": 0.5344343, "at": 1795454644.364, "ms": 50.123}
    yield _timed("seeds of a micro-batch, us", lambda: seed_step(0, 1000, 0), calls)
    yield _timed("a batch of 1 row under its seed, us", lambda: samples.__getitems__(range(1)), calls)
    yield _timed("a batch of 64 rows under their seeds, us", lambda: samples.__getitems__(range(64)), calls)
    yield _timed("mean loss, us", lambda: crew.mean_loss(crew.bring(losses)), calls)
    with tempfile.TemporaryDirectory() as folder:
        yield _timed("line of the log, us", lambda: append_line(Path(folder) / "metrics.jsonl", row), calls)


def told(rank: int, size: int, *, calls: int = 300) -> Iterator[Figure]:
    """Measures on each rank of a group what is told in each step."""
    crew, losses = Crew(_CPU, rank, size), [torch.tensor(1.0)]
    name = f"{size} ranks agree on whether to stop and add up a loss, us"
    yield _timed(name, lambda: crew.agree((False, False, False), crew.bring(losses)), calls)


def _timed(name: str, call: Callable[[], object], calls: int) -> Figure:
    call()
    found = []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) / calls * 1e6)
    return median_figure(name, found)
