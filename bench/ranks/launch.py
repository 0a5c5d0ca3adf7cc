"""Ranks of a gloo group, forked from a process that has loaded torch: they start at once, and are ended in time."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from bench.bounded import PartFailedError
from bench.processes import die_with_parent
from bench.record import Figure, one_line

Work = Callable[[int, int], Iterable[Figure]]
"""Called with rank and number of ranks on each of them; what the first rank yields is kept."""


def on_ranks(work: Work, size: int, seconds: float) -> Iterator[Figure]:
    """Yields what the first of ``size`` ranks yields, as it is made; all ranks end after ``seconds``.

    Each has its share of the cores and one thread, as torchrun gives.

    Raises:
        PartFailedError: A rank raised, died, or was ended.
    """
    if seconds <= 0:
        raise PartFailedError("there was no time left for it")
    fork = multiprocessing.get_context("fork")  # work is a closure, and needs what this process has loaded
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            fork.Process(target=_run, args=(work, rank, size, Path(folder) / "store", pipes[rank][1]), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for _, sending in pipes:
            sending.close()
        try:
            yield from _received([receiving for receiving, _ in pipes], ends, seconds)
        finally:
            for process in ranks:
                process.kill()
                process.join()
            for receiving, _ in pipes:
                receiving.close()


def _received(pipes: list[Connection], ends: float, seconds: float) -> Iterator[Figure]:
    waiting = dict(enumerate(pipes))
    while waiting:
        for rank, pipe in tuple(waiting.items()):
            if not pipe.poll(0.05 if len(waiting) > 1 else max(0.0, ends - time.monotonic())):
                if time.monotonic() >= ends:
                    raise PartFailedError(f"rank {rank} was not done after {seconds:g} s")
                continue
            try:
                made: Figure | str | None = pipe.recv()
            except EOFError:
                raise PartFailedError(f"rank {rank} died") from None
            if isinstance(made, str):
                raise PartFailedError(f"rank {rank}: {made}")
            if made is None:
                del waiting[rank]
            elif rank == 0:
                yield made


def _run(work: Work, rank: int, size: int, store: Path, sending: Connection) -> None:
    die_with_parent()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
    }
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
        for figure in work(rank, size):
            if rank == 0:
                sending.send(figure)
        dist.barrier()
    except Exception as error:  # of any kind: it becomes the reason of figures that are missing
        sending.send(one_line(error))
    else:
        sending.send(None)
    sending.close()
    os._exit(0)  # gloo's threads may wait for ranks that have gone
