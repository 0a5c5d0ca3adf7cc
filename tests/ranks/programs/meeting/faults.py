"""Faults of ranks: each function is one rank's program, run by ``ranks.nursery`` until it ends or hangs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mosaic.backends.host.backend import HostBackend
from mosaic.ranks.colocate import colocate_ranks
from ranks.begun import ROWS, STEPS, at_step, begin, join, kill_this_process, train, watching
from ranks.training import Model, batch

WHOLE_EXITS = {"in_order"}
"""Programs that are torn down to the last; for the others that would cost more than what they do."""


# Killed.


def killed(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)
    train(model, before=at_step(2, kill_this_process) if rank == 1 else lambda step: None)


# Ended otherwise.


def an_error_on_one(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)

    def fail() -> None:
        raise ValueError("no such caption")

    train(model, before=at_step(2, fail) if rank == 1 else lambda step: None)


def fewer_batches_on_one(rank: int, size: int, place: Path) -> None:
    model, handle = begin(rank, size, place)
    train(model, steps=STEPS - (rank == 1))
    if rank == 1:
        handle.remove(gather=False)


# Slow, or stuck.


def unlike(rank: int, size: int, place: Path) -> None:
    """Rank 1 has another torch and then another sample; all ranks are told each time."""
    from mosaic.errors import MosaicError
    from mosaic.ranks import session

    join(rank, size, place)
    plain = session.facts_of
    session.facts_of = lambda *of: {**plain(*of), **(changes if rank == 1 else {})}
    changes: dict[str, Any] = {}
    for changed in ({"torch": "2.5.0"}, {}):
        changes.clear()
        changes.update(changed)
        sample = batch(0, ROWS)
        if rank == 1 and not changed:
            sample["text"] = torch.zeros(ROWS, 9, dtype=torch.int64)
        try:
            colocate_ranks(Model(), sample=sample, backend=HostBackend(1), options=watching())
        except MosaicError as error:
            print(error)


def in_order(rank: int, size: int, place: Path) -> None:
    """Ranks end at different times, without a word to Mosaic, and destroy what they like."""
    model, _ = begin(rank, size, place)
    train(model)
    dist.destroy_process_group()
    if rank:
        threading.Event().wait(0.7)
    print("trained")


def uninterrupted(rank: int, size: int, place: Path) -> None:
    """The program that torchrun restarts elsewhere, here without a fault."""
    from ranks.programs.meeting import restart

    join(rank, size, place)
    restart.program(place, -1, -1)
