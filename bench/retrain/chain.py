"""A chain of kills: a folder is run, killed at instants drawn by a seed, and run again, until nothing is left to do."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from mosaic.lines import steps_in
from mosaic.retrain.folder import DayFolder, Folder

Target = Literal["launcher", "worker", "loader", "all", "told", "told twice"]
"""Receivers of SIGKILL; ``told``: the launcher receives SIGTERM; ``told twice``: and again at once."""
_START = "import sys; from mosaic.cli.main import main; main(sys.argv[1:])"


class Running(Protocol):
    """A launcher."""

    pid: int

    def poll(self) -> int | None:
        """Returns how it ended; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Returns how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill that fell."""

    target: Target
    day: str
    """The day that was under way; empty before the first."""
    step: int
    """Its steps that were logged before; a step after them may have been under way."""
    files: tuple[str, ...]
    """The day's files that were there."""
    left: int
    """Processes that should have ended by it, and had not after a while."""


def program(folder: Folder) -> subprocess.Popen[bytes]:
    """Starts ``mosaic retrain run``, as a timer would."""
    return subprocess.Popen(
        [sys.executable, "-c", _START, "retrain", "run", str(folder.path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def chain(
    folder: Folder,
    start: Callable[[Folder], Running],
    *,
    seed: int,
    targets: tuple[Target, ...],
    longest_s: float,
    early: float = 0.2,
) -> Iterator[Kill]:
    """Runs a folder until nothing is left to do, and kills on the way; yields each kill.

    Args:
        folder: What is run.
        start: Starts the launcher.
        seed: Of instants and targets.
        targets: Each gets its turn before one gets its second.
        longest_s: A kill falls at most so long after the worker's first sign of life.
        early: Share of the kills that do not wait for that sign.
    """
    draw, turn = random.Random(seed), list[Target]()
    process = start(folder)
    while process.poll() != 0:
        if process.poll() is not None:  # it was killed, or told to stop, or had failed after a kill
            process = start(folder)
        before, waits = _signs(folder), draw.random() >= early
        while waits and process.poll() is None and _signs(folder) == before:
            time.sleep(0.002)
        until = time.monotonic() + draw.uniform(0.0, longest_s)
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        turn = turn or draw.sample(targets, len(targets))
        target = turn.pop()
        struck = _strike(process, target) if process.poll() is None else ()
        if not struck:  # there was no such process; its turn comes again
            turn.insert(0, target)
        else:
            day = folder.days()[-1] if folder.days() else None
            process.poll()
            left = alive(struck)
            yield Kill(
                target=target,
                day=day.path.name if day is not None else "",
                step=max(steps_in(day.metrics), default=0) if day is not None else 0,
                files=tuple(sorted(path.name for path in day.path.iterdir())) if day is not None else (),
                left=len(left),
            )


def descendants(pid: int) -> tuple[int, ...]:
    """Returns the processes that a process has started, and those started by them."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return tuple(found)


def alive(pids: tuple[int, ...], within_s: float = 60.0) -> tuple[int, ...]:
    """Returns which of some processes have not ended after a while."""
    until = time.monotonic() + within_s
    while (left := tuple(pid for pid in pids if _runs(pid))) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _strike(process: Running, target: Target) -> tuple[int, ...]:
    """Kills; returns who has to end by it: none where there was nobody to be killed."""
    family = descendants(process.pid)
    workers = tuple(pid for pid in family if _parent(pid) == process.pid)
    loaders = tuple(pid for pid in family if pid not in workers)
    killed, ending = {
        "launcher": ((process.pid,), (process.pid, *family)),
        "worker": (workers[:1], (*workers[:1], *loaders)),
        "loader": (loaders[:1], loaders[:1]),
        "all": ((process.pid, *family), (process.pid, *family)),
        "told": ((process.pid,), (process.pid, *family)),
        "told twice": ((process.pid,), (process.pid, *family)),
    }[target]
    number = signal.SIGTERM if target.startswith("told") else signal.SIGKILL
    for pid in killed:
        _send(pid, number)
    if target == "told twice":
        time.sleep(0.01)  # two signals at once are one
        _send(process.pid, number)
    return ending if killed else ()


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _signs(folder: Folder) -> object:
    """Returns the files that a worker changes first in a day's folder, with their times."""
    days = folder.days()
    return [(path.name, path.stat().st_mtime_ns) for path in _worker_files(days[-1])] if days else None


def _worker_files(day: DayFolder) -> list[Path]:
    return sorted(
        path for path in (day.sources, day.metrics, day.checkpoints, day.trained, day.scores) if path.exists()
    )
