"""Running tests on several ranks: processes that meet in a file and answer with a file each."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ranks.nursery import run_program


def run_ranks(
    function: str, size: int, folder: Path, *, timeout: float = 120.0, arguments: Sequence[Any] = ()
) -> list[Any]:
    """Calls ``module:function(rank, size, *arguments)`` on ranks that share a gloo group; returns what each returned.

    A rank that hangs is ended, and is an error, as is one that fails.
    """
    (folder / "asked.json").write_text(json.dumps([function, list(arguments)]))
    ended = run_program("ranks.cases:answer", size, folder, seconds=timeout)
    failed = [
        f"rank {rank}: {f'exit code {one.code}' if one.code is not None else f'hangs after {timeout} s'}\n{one.said}"
        for rank, one in enumerate(ended)
        if one.code != 0
    ]
    assert not failed, "\n".join(failed)
    return [torch.load(folder / f"answer{rank}.pt", weights_only=True) for rank in range(size)]


def answer(rank: int, size: int, folder: Path) -> None:
    """Is one rank's program: joins the others, calls the function, and stores its result."""
    import torch.distributed as dist

    function, arguments = json.loads((folder / "asked.json").read_text())
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(rank, size, *arguments)
    torch.save(result, folder / f"answer{rank}.pt")
    dist.destroy_process_group()
