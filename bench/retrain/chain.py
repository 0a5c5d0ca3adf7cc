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
from mosaic.retrain.folder import Folder

Target = Literal["launcher", "worker", "loader", "all", "told", "told twice"]
"""Receivers of SIGKILL; ``told``: the launcher receives SIGTERM; ``told twice``: and again at once."""
TARGETS: dict[Target, str] = {
    "launcher": "kills of the launcher alone",
    "worker": "kills of the process that trains alone",
    "loader": "kills of a process that loads data alone",
    "all": "kills of all processes at once",
    "told": "kills by SIGTERM, which ends the step first",
    "told twice": "kills by SIGTERM and again at once",
}
"""Names of kills in figures."""
EARLY = 0.2
"""Share of the kills that do not wait for the worker's first sign."""
_START = "import sys; from mosaic.cli.main import main; main(sys.argv[1:])"


class Running(Protocol):
    """A launcher."""

    pid: int

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill that fell."""

    target: Target
    day: str
    """The current day; empty before the first."""
    step: int
    """Its last logged step; a later step may have run."""
    files: tuple[str, ...]
    """The day's files at the kill."""
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


def chain(folder: Folder, start: Callable[[Folder], Running], *, seed: int, longest_s: float) -> Iterator[Kill]:
    """Runs a folder until nothing is left to do, and kills on the way; yields each kill.

    A kill falls at most ``longest_s`` after the worker's first sign. Each target gets its turn before another gets its
    second.
    """
    draw, turn = random.Random(seed), list[Target]()
    process = start(folder)
    while process.poll() != 0:
        if process.poll() is not None:  # it was killed, or told to stop, or had failed after a kill
            process = start(folder)
        before, waits = _signs(folder), draw.random() >= EARLY
        while waits and process.poll() is None and _signs(folder) == before:
            time.sleep(0.002)
        until = time.monotonic() + draw.uniform(0.0, longest_s)
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        turn = turn or draw.sample(tuple(TARGETS), len(TARGETS))
        target = turn.pop()
        struck = _strike(process, target) if process.poll() is None else ()
        if not struck:  # there was no such process; its turn comes again
            turn.insert(0, target)
            continue
        day = next(reversed(folder.days()), None)
        process.poll()
        yield Kill(
            target=target,
            day=day.path.name if day is not None else "",
            step=max(steps_in(day.metrics), default=0) if day is not None else 0,
            files=tuple(sorted(path.name for path in day.path.iterdir())) if day is not None else (),
            left=len(alive(struck)),
        )


def descendants(pid: int) -> tuple[int, ...]:
    """Returns the processes that a process has started, and those started by them."""
    pids: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                pids += [int(child), *descendants(int(child))]
    return tuple(pids)


def alive(pids: tuple[int, ...], within_s: float = 60.0) -> tuple[int, ...]:
    """Returns the processes that have not ended after a while."""
    until = time.monotonic() + within_s
    while (left := tuple(pid for pid in pids if _stat(pid, 0) not in ("Z", ""))) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _strike(process: Running, target: Target) -> tuple[int, ...]:
    """Kills; returns the processes that have to end by it: none without a process to kill."""
    family = descendants(process.pid)
    workers = tuple(pid for pid in family if _stat(pid, 1) == str(process.pid))
    loaders = tuple(pid for pid in family if pid not in workers)
    whole = (process.pid, *family)
    killed, ending = {
        "worker": (workers[:1], (*workers[:1], *loaders)),
        "loader": (loaders[:1], loaders[:1]),
        "all": (whole, whole),
    }.get(target, ((process.pid,), whole))
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


def _stat(pid: int, place: int) -> str:
    """Returns a process's state (0) or parent (1); empty without the process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[place]
    return ""


def _signs(folder: Folder) -> object:
    """Returns the files that a worker changes first in a day's folder, with their times."""
    day = next(reversed(folder.days()), None)
    if day is None:
        return None
    paths = (day.sources, day.metrics, day.checkpoints, day.trained, day.scores)
    return [(path.name, path.stat().st_mtime_ns) for path in paths if path.exists()]
