"""How programs of ranks that go wrong begin, and the loop that they run."""

from __future__ import annotations

import datetime
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_training import Model, batch, draw_plan, loss_of
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.plan import Plan
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.meeting.watch import WatchSettings
from mosaic.ranks.running.handle import RankHandle

WATCH = WatchSettings(beat_s=0.2, grace_s=1.5)
SHORT_S = 2.0
"""For programs that are to run out of time; the others have enough of it on any machine."""
TIMEOUT_S = 30.0
ROWS = 3
STEPS = 4


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def join(rank: int, size: int, place: Path) -> None:
    """Makes the group of all ranks, as a loop or torchrun would."""
    store = dist.FileStore(str(place / "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=TIMEOUT_S)
    )


def halves(model: nn.Module, size: int) -> Plan:
    """Every module on some of the ranks, so that rows travel."""
    return draw_plan(model, size, random.Random(3))


def begin(rank: int, size: int, place: Path, **options: Any) -> tuple[Model, RankHandle]:
    join(rank, size, place)
    torch.manual_seed(0)
    model = Model()
    given = {"plan": halves(model, size), "watch": WATCH, "timeout_s": TIMEOUT_S, **options}
    return model, colocate_ranks(model, sample=batch(0, ROWS), backend=HostBackend(1), **given)


def train(model: Model, steps: int = STEPS, before: Callable[[int], None] = lambda step: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        before(step)
        loss_of(model(**batch(step, ROWS))).backward()
        optimizer.step()
        optimizer.zero_grad()


def at_step(wanted: int, act: Callable[[], object]) -> Callable[[int], None]:
    return lambda step: act() if step == wanted else None
