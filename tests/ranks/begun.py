"""How programs of ranks that go wrong begin, and the loop that they run."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mosaic.engine.options import Options, RankSettings
from mosaic.ranks import RankHandle
from ranks.graphs import colocated, in_part
from ranks.training import Model, batch, loss_of

SHORT_S = 2.0
"""For programs that are to run out of time; the others have enough of it on any machine."""
TIMEOUT_S = 30.0
ROWS = 3
WATCH = {"heartbeat_s": 0.2, "grace_s": 1.5}
"""How ranks watch each other: with less patience than by default."""
STEPS = 4


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def join(rank: int, size: int, place: Path) -> None:
    """Makes the group of all ranks, as a loop or torchrun would."""
    store = dist.FileStore(str(place / "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=TIMEOUT_S)
    )


Program = Callable[[int, int, Path], None]


def in_turn(*programs: Program) -> Program:
    """One program of several, which share one start of the ranks; each has a folder of its own."""

    def run(rank: int, size: int, place: Path) -> None:
        join(rank, size, place)
        for program in programs:
            own = place / program.__name__
            own.mkdir(exist_ok=True)
            program(rank, size, own)
        print("equal")

    return run


def watching(**settings: Any) -> Options:
    return Options(ranks=RankSettings(**{"timeout_s": TIMEOUT_S, **WATCH, **settings}))


def begin(rank: int, size: int, place: Path) -> tuple[Model, RankHandle]:
    """Joins the others and colocates a model with each module on some of the ranks, so that rows travel."""
    join(rank, size, place)
    torch.manual_seed(0)
    model, sample = Model(), batch(0, ROWS)
    members = in_part(["image", "text", "audio", "backbone", "head"], size)
    return model, colocated(model, sample, members, size, timeout_s=TIMEOUT_S, **WATCH)


def train(model: Model, steps: int = STEPS, before: Callable[[int], None] = lambda step: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        before(step)
        loss_of(model(**batch(step, ROWS))).backward()
        optimizer.step()
        optimizer.zero_grad()


def at_step(wanted: int, act: Callable[[], object]) -> Callable[[int], None]:
    return lambda step: act() if step == wanted else None
