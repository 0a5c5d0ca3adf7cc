"""Compares repeatedly killed days with undisturbed days, bit for bit.

A chain runs a folder, kills it at random times, and runs it again until nothing is left to do.
``python -m bench.retrain [--quick] [--json FILE]``
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from bench.record import Figure
from bench.retrain.small_folder import bits_of, write_day, write_folder
from mosaic.artifact import lines_of, load
from mosaic.retrain.folder import Folder
from mosaic.retrain.report import DayReport

Target = Literal["launcher", "worker", "loader", "all", "told", "told twice"]
"""Receivers of SIGKILL; ``told``: the launcher receives SIGTERM; ``told twice``: and again at once."""
Start = Callable[[Folder], Any]
"""Starts a launcher: a ``subprocess.Popen``, or a fork with its ``pid``, ``poll`` and ``wait``."""
EARLY = 0.2
"""Share of the kills that do not wait for the worker's first sign."""
WORKERS = 2
"""Processes that load data in killed days; the undisturbed days have none."""
PAUSE_S = 0.02
"""Time of a micro-batch; two of them are a step."""
LONGEST_S = 2.5
"""Latest kill after a worker's first sign; a day's training and scoring take as long."""
_PROGRAM = "import sys; from mosaic.cli.main import main; main(sys.argv[1:])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill."""

    target: Target
    left: int
    """Processes that did not end after the kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledDay:
    """A day, after its kills."""

    kills: tuple[Kill, ...]
    differs: tuple[str, ...]
    """Names of values that differ from an undisturbed run's; empty if all is well."""
    again_differently: int
    """Steps that were made more than once, with another loss the second time."""
    outcome: str | None
    report: DayReport


def kill_figures(left_s: float, *, count: int, seed: int = 0) -> Iterator[Figure]:
    """Kills days that ``mosaic retrain run`` runs; ends a little after the given seconds."""
    with tempfile.TemporaryDirectory() as top:
        until = time.monotonic() + left_s
        days = tuple(killed_days(Path(top), program, count=count, seed=seed, until=until))
    kills = [kill for day in days for kill in day.kills]
    for name, value in (
        ("kills of a daily run", len(kills)),
        ("days that ended with other bits than undisturbed", sum(bool(day.differs) for day in days)),
        ("days that were not promoted", sum(day.outcome != "promoted" for day in days)),
        ("steps made again with another loss", sum(day.again_differently for day in days)),
        ("processes left behind", sum(kill.left for kill in kills)),
    ):
        yield Figure(name=name, source="measured", value=float(value))


def killed_days(
    top: Path,
    start: Start,
    *,
    count: int,
    seed: int,
    longest_s: float = LONGEST_S,
    pause_s: float = PAUSE_S,
    until: float = float("inf"),
) -> Iterator[KilledDay]:
    """Runs days, each from the model of the day before, until ``count`` kills have fallen.

    No day begins after ``until``, on the clock of ``time.monotonic()``.
    """
    quiet, killed = write_folder(top / "quiet"), write_folder(top / "killed", budget={"workers": WORKERS})
    fallen = 0
    for index in range(count):
        if fallen >= count or time.monotonic() > until:
            return
        day = (date(2026, 11, 20) + timedelta(days=index)).isoformat()
        write_day(quiet.path, day)
        write_day(killed.path, day, pause_s=pause_s)
        if (code := start(quiet).wait()) != 0:
            raise RuntimeError(f"{day}, undisturbed, ended with {code}: {quiet.day(day).state}")
        kills = tuple(_chain(killed, start, seed=seed + index, longest_s=longest_s))
        fallen += len(kills)
        expected, bits = bits_of(quiet.day(day)), bits_of(killed.day(day))
        losses: dict[int, set[float]] = {}
        for row in lines_of(killed.day(day).metrics):
            losses.setdefault(row["step"], set()).add(row["loss"])
        yield KilledDay(
            kills=kills,
            differs=tuple(name for name in expected if expected[name] != bits[name]),
            again_differently=sum(len(of_step) > 1 for of_step in losses.values()),
            outcome=killed.day(day).state.outcome,
            report=load(DayReport, killed.day(day).report),
        )


def program(folder: Folder) -> subprocess.Popen[bytes]:
    """Starts ``mosaic retrain run``, as a timer would."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, "retrain", "run", str(folder.path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _chain(folder: Folder, start: Start, *, seed: int, longest_s: float) -> Iterator[Kill]:
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
        turn = turn or draw.sample(get_args(Target), len(get_args(Target)))
        target = turn.pop()
        struck = _strike(process, target) if process.poll() is None else ()
        if not struck:  # there was no such process; its turn comes again
            turn.insert(0, target)
            continue
        process.poll()
        yield Kill(target=target, left=len(alive(struck)))


def _strike(process: Any, target: Target) -> tuple[int, ...]:
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
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    if target == "told twice":
        time.sleep(0.01)  # two signals at once are one
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
    return ending if killed else ()


def _signs(folder: Folder) -> object:
    """Returns the files that a worker changes first in a day's folder, with their times."""
    day = next(reversed(folder.days()), None)
    if day is None:
        return None
    paths = (day.sources, day.metrics, day.checkpoints, day.trained, day.scores)
    return [(path.name, path.stat().st_mtime_ns) for path in paths if path.exists()]


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


def _stat(pid: int, place: int) -> str:
    """Returns a process's state (0) or parent (1); empty without the process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[place]
    return ""
