"""Ranks of a gloo group, forked from a process that has loaded torch, with a time limit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from bench.processes import side_by_side
from bench.record import Figure

Work = Callable[[int, int], Iterable[Figure]]
"""Called with rank and number of ranks on each of them; what the first rank yields is kept."""


def on_ranks(work: Work, size: int, seconds: float) -> Iterator[Figure]:
    """Yields what the first of ``size`` ranks yields, as it is made; all ranks end after ``seconds``.

    Each has its share of the cores and one thread, as torchrun gives.

    Raises:
        PartFailedError: A rank raised, died, or was ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        yield from side_by_side(
            {f"rank {rank}": partial(_run, work, rank, size, store) for rank in range(size)}, seconds
        )


def _run(work: Work, rank: int, size: int, store: Path) -> Iterator[Figure]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(place) for name, place in places.items()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
    for figure in work(rank, size):
        if rank == 0:
            yield figure
    dist.barrier()
