"""Kills a process at every step of a save on the disk, one after the other, and looks at what is left.

Run as ``python checkpoint_kills.py FOLDER``; prints, for each instant, the newest step and how many are complete.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mosaic.checkpoint.folder import checkpoints_in, damage_of
from mosaic.checkpoint.loading import LoadRequest, load
from mosaic.checkpoint.ranks import OneRank
from mosaic.checkpoint.saving import Saver, SaveRequest

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
KEEP = 2


def save(folder: Path, step: int) -> None:
    """Saves a model whose weights are the step."""
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    optimizer = torch.optim.AdamW(model.parameters())
    saver = Saver(OneRank())
    job = SaveRequest(model=model, folder=folder, step=step, optimizer=optimizer, extra={"step": step}, keep=KEEP)
    saver.save(job)
    saver.finish()


def loaded_step(folder: Path) -> int:
    """Loads the newest, and checks that it is of one piece."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    request = LoadRequest(model=model, folder=folder, optimizer=optimizer)
    found = load(request, OneRank())
    assert found.extra == {"step": found.step}
    assert all(bool((parameter == found.step).all()) for parameter in model.parameters())
    return found.step


def in_child(work: Callable[[], None]) -> int:
    """Runs it in a fork of this process, which has no threads; returns how it ended."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(instant: int, folder: Path) -> None:
    """Saves step 3, and ends without warning before the ``instant``-th thing that it does in the folder."""
    left = instant

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(folder) in str(arguments[0]):
            tick()

    flush = os.fsync

    def fsync(handle: int) -> None:
        tick()
        flush(handle)
        tick()

    os.fsync = fsync
    sys.addaudithook(watched)
    save(folder, 3)


def after(folder: Path) -> None:
    """Goes on as a run that is started again would."""
    before = loaded_step(folder)
    save(folder, before + 1)
    assert loaded_step(folder) == before + 1
    assert len(checkpoints_in(folder)) == KEEP
    assert not list(folder.glob(".*")), list(folder.iterdir())


def main(top: Path) -> None:
    start = top / "start"
    for step in (1, 2):  # here, so that forks find everything imported
        save(start, step)
        assert loaded_step(start) == step
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(10)  # what wrote is about to end; a fork must not find it
    assert threading.active_count() == 1, threading.enumerate()
    for instant in range(1, 200):
        folder = top / f"killed{instant}"
        shutil.copytree(start, folder)
        ended = in_child(lambda folder=folder, instant=instant: killed_at(instant, folder))
        complete = checkpoints_in(folder)
        for found in complete:
            assert damage_of(found.path) == (), (instant, found)
        assert in_child(lambda folder=folder: after(folder)) == 0, instant
        if ended == 0:
            return
        assert ended == -signal.SIGKILL, (instant, ended)
        print(complete[0].step, len(complete))
    raise AssertionError("it was never through")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
