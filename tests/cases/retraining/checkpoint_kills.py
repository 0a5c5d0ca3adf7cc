"""Kills a process at every step of a save on the disk, one after the other, and looks at what is left.

Run as ``python checkpoint_kills.py FOLDER``; prints,
for each instant of a save, the newest step and how many are complete.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.checkpoint.folder import checkpoints_in, damage_of

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}
KEEP = 2
_T = TypeVar("_T")


def train_state() -> dict[str, Any]:
    """Returns a model, its average, an optimizer for each of its parameters, a scaler, a generator."""
    model = nn.Linear(4, 3)
    return {
        "model": model,
        "optimizer": {name: torch.optim.AdamW([parameter]) for name, parameter in model.named_parameters()},
        "scaler": torch.amp.GradScaler("cpu", init_scale=1.0),
        "companions": {"average": nn.Linear(4, 3)},
        "generators": {"own": torch.Generator()},
    }


def save(folder: Path, step: int) -> None:
    """Saves a state whose weights, scale and seed are the step."""
    state = train_state()
    model, scaler = state.pop("model"), state["scaler"]
    with torch.no_grad():
        for parameter in (*model.parameters(), *state["companions"]["average"].parameters()):
            parameter.fill_(step)
    scaler.load_state_dict({**scaler.state_dict(), "scale": float(step)})
    state["generators"]["own"].manual_seed(step)
    checkpointer = Checkpointer(model)
    checkpointer.save(folder, step=step, extra={"step": step}, keep=KEEP, **state)
    checkpointer.finish_saving()


def loaded_step(folder: Path) -> int:
    """Loads the newest checkpoint, and checks that all its parts have its step."""
    state = train_state()
    model = state.pop("model")
    loaded = Checkpointer(model).load(folder, **state)
    assert loaded is not None
    assert loaded.extra == {"step": loaded.step}
    for parameter in (*model.parameters(), *state["companions"]["average"].parameters()):
        assert bool((parameter == loaded.step).all())
    assert state["scaler"].get_scale() == loaded.step
    assert state["generators"]["own"].initial_seed() == loaded.step
    return loaded.step


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


def killed_at(instant: int, folder: Path, work: Callable[[], _T]) -> _T:
    """Does the work; kills this process before or after the ``instant``-th change of a file in the folder."""
    left = instant

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(event: str, arguments: tuple[Any, ...]) -> None:
        reads = event == "open" and not int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if event in EVENTS and not reads and str(folder) in str(arguments[0]):
            tick()

    flush = os.fsync

    def fsync(handle: int) -> None:
        tick()
        flush(handle)
        tick()

    os.fsync = fsync
    sys.addaudithook(watched)
    return work()


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
    for folder in killed_at_each(start, lambda folder: save(folder, 3)):
        complete = checkpoints_in(folder)
        for checkpoint in complete:
            assert damage_of(checkpoint.path) == (), checkpoint
        if len(list(start.parent.iterdir())) % 2:  # each second time, since a process each takes a while
            assert in_child(lambda folder=folder: after(folder)) == 0, folder
        print(complete[0].step, len(complete))


def killed_at_each(start: Path, work: Callable[[Path], object]) -> Iterator[Path]:
    """Does it in copies of a folder, killed at one instant after the other, until one is through; returns each copy."""
    for instant in range(1, 200):
        folder = start.parent / f"killed{instant}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        ended = in_child(lambda folder=folder, instant=instant: killed_at(instant, folder, lambda: work(folder)))
        if ended == 0:
            return
        assert ended == -signal.SIGKILL, (instant, ended)
        yield folder
    raise AssertionError("it was never through")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
