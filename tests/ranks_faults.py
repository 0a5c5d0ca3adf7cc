"""What goes wrong on ranks: each function is one rank's program, run by ``ranks_nursery`` until it ends or hangs."""

from __future__ import annotations

import ctypes
import datetime
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_training import Model, batch, draw_plan, loss_of
from torch import nn

from mosaic.backends.host import HostBackend
from mosaic.plan import Plan
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.handle import RankHandle
from mosaic.ranks.watch import WatchSettings

WATCH = WatchSettings(beat_s=0.2, grace_s=1.5)
TIMEOUT_S = 2.0
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


# Killed.


def killed_before_a_call(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)
    train(model, before=at_step(2, kill_this_process) if rank == 1 else lambda step: None)


def killed_while_it_waits_and_another_computes(rank: int, size: int, place: Path) -> None:
    """Rank 1 is killed while it waits for rank 2, which is at something else and will not come to a message."""
    model, handle = begin(rank, size, place)
    progress = handle.world.progress

    def kill_when_waiting() -> None:
        while not (progress.calls == 3 and progress.now.doing == "waiting" and progress.now.for_s > 0.3):
            pass
        kill_this_process()

    def compute() -> None:
        while True:
            sum(range(1000))

    if rank == 1:
        threading.Thread(target=kill_when_waiting, daemon=True).start()
    train(model, before=at_step(2, compute) if rank == 2 else lambda step: None)


def killed_in_a_backward(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)

    def mark(step: int) -> None:
        if rank == 0 and step == 1:
            model.mix.register_hook(lambda grad: kill_this_process())

    train(model, before=mark)


def killed_after_a_step(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 3:
        optimizer.register_step_post_hook(lambda *_: kill_this_process())
    for step in range(STEPS):
        loss_of(model(**batch(step, ROWS))).backward()
        optimizer.step()


def killed_while_it_profiles(rank: int, size: int, place: Path) -> None:
    if rank == 0:
        planning = sys.modules["mosaic.ranks.planning"]
        planning.profile_of_all = lambda *args, **options: kill_this_process()  # type: ignore[attr-defined]
    begin(rank, size, place, plan=None, timeout_s=60.0)


def killed_before_there_are_groups(rank: int, size: int, place: Path) -> None:
    from mosaic.ranks.world import World

    if rank == 1:
        World.group = lambda *args, **options: kill_this_process()  # type: ignore[assignment]
    begin(rank, size, place, timeout_s=60.0)


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
        threading.Event().wait(1.0)  # it lives on, with something else to do


def interrupted(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)
    train(model, before=at_step(1, lambda: os.kill(os.getpid(), signal.SIGINT)) if rank == 1 else lambda step: None)


def fails_at_the_start(rank: int, size: int, place: Path) -> None:
    join(rank, size, place)
    model = Model()
    if rank == 1:

        def broken(*args: Any, **options: Any) -> None:
            raise OSError("no lanes here")

        HostBackend.open_lanes = broken  # type: ignore[method-assign]
    plan = halves(model, size)
    colocate_ranks(model, sample=batch(0, ROWS), backend=HostBackend(1), plan=plan, watch=WATCH, timeout_s=30.0)


# Slow, or stuck.


def stopped(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)
    train(model, before=at_step(1, lambda: os.kill(os.getpid(), signal.SIGSTOP)) if rank == 1 else lambda step: None)


def interpreter_held(rank: int, size: int, place: Path) -> None:
    """A rank that holds its interpreter for many beats is late, and nothing else."""
    model, _ = begin(rank, size, place)
    usleep = ctypes.PyDLL(None).usleep
    train(model, before=at_step(1, lambda: usleep(1_300_000)) if rank == 1 else lambda step: None)
    print("trained")


def busy(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)
    train(model, before=at_step(1, threading.Event().wait) if rank == 1 else lambda step: None)


# In order.


def in_order(rank: int, size: int, place: Path) -> None:
    """Ranks end at different times, without a word to Mosaic, and destroy what they like."""
    model, _ = begin(rank, size, place)
    train(model)
    dist.destroy_process_group()
    if rank:
        threading.Event().wait(0.7)
    print("trained")


def caught(rank: int, size: int, place: Path) -> None:
    """The program may go on after the error: its process is not ended once it has taken its handle away."""
    from mosaic.errors import RankFailedError

    model, handle = begin(rank, size, place)
    try:
        train(model, before=at_step(1, kill_this_process) if rank == 1 else lambda step: None)
    except RankFailedError as error:
        handle.remove(gather=False)
        threading.Event().wait(WATCH.grace_s + 0.3)
        print("caught", error.ranks)


def uninterrupted(rank: int, size: int, place: Path) -> None:
    """The program that torchrun restarts elsewhere, here without a fault."""
    import ranks_restart

    join(rank, size, place)
    ranks_restart.program(place, -1, -1)
