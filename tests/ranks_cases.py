"""Running tests on several ranks: processes that meet in a file and answer with a file each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_MAIN = """
import sys, importlib
sys.path[:0] = {paths!r}
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, size = {rank}, {size}
store = dist.FileStore({store!r}, size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
module, name = {function!r}.split(":")
result = getattr(importlib.import_module(module), name)(rank, size, *{arguments!r})
torch.save(result, {answer!r})
dist.destroy_process_group()
"""


def run_ranks(
    function: str, size: int, folder: Path, *, timeout: float = 120.0, arguments: Sequence[Any] = ()
) -> list[Any]:
    """Calls ``module:function(rank, size)`` on ranks that share a gloo group; returns what each returned.

    A rank that hangs is ended, and is an error, as is one that fails.
    """
    paths = [path for path in sys.path if path]
    answers = [folder / f"answer{rank}.pt" for rank in range(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                _MAIN.format(
                    paths=paths,
                    rank=rank,
                    size=size,
                    store=str(folder / "store"),
                    function=function,
                    arguments=tuple(arguments),
                    answer=str(answers[rank]),
                ),
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if processes[rank].returncode]
    assert not failed, "\n".join(failed)
    return [torch.load(answer, weights_only=True) for answer in answers]
