"""Processes that end with the one that started them, and in time; what they had made by then stays."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from bench.record import Status, one_line

Make = Callable[[], Iterable[Any]]
"""Makes figures, or anything else that can be pickled."""


class PartFailedError(Exception):
    """A part raised, died, or was ended; the message says which."""

    def __init__(self, message: str, status: Status = "failed") -> None:
        super().__init__(message)
        self.status = status


def within(make: Make, seconds: float, context: BaseContext | None = None) -> Iterator[Any]:
    """Yields a part's figures as they are made, in a process that ends after ``seconds``.

    Raises:
        PartFailedError: It did not come to its end.
    """
    yield from side_by_side({"its process": make}, seconds, context)


def side_by_side(makes: Mapping[str, Make], seconds: float, context: BaseContext | None = None) -> Iterator[Any]:
    """Yields what named processes make, which run at the same time and all end after ``seconds``; by default forked.

    Raises:
        PartFailedError: One of them did not come to its end.
    """
    if seconds <= 0:
        raise PartFailedError("there was no time left for it")
    starter: Any = context or multiprocessing.get_context("fork")
    ends = time.monotonic() + seconds
    children, waiting = [], {}
    for name, make in makes.items():
        receiving, sending = starter.Pipe(duplex=False)
        waiting[receiving] = name
        children.append(starter.Process(target=_send, args=(make, sending), name=name))
        children[-1].start()
        sending.close()
    processes = dict(zip(waiting.values(), children, strict=True))
    try:
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, ends - time.monotonic()))
            if not ready:
                name = next(iter(waiting.values()))
                raise PartFailedError(f"{name} was not done after {seconds:g} s", "timed out")
            for pipe in ready:
                name = waiting[pipe]
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    raise _death_of(name, processes[name]) from None
                if kind == "error":
                    raise PartFailedError(f"{name}: {value}")
                if kind == "end":
                    del waiting[pipe]
                else:
                    yield value
    finally:
        for child in children:
            kill_group(child.pid)
            child.kill()
            child.join(10)


def _death_of(name: str, process: Any) -> PartFailedError:
    process.join(10)
    code = process.exitcode
    if code is not None and code < 0:
        known = -code in set(signal.Signals)
        return PartFailedError(f"{name} died: {signal.Signals(-code).name if known else -code}", "killed")
    return PartFailedError(f"{name} died: it exited with code {code}")


def _send(make: Make, sending: Connection) -> None:
    die_with_parent()
    try:
        for value in make():
            sending.send(("made", value))
        sending.send(("end", None))
    except BaseException as error:  # of any kind: it becomes the reason of figures that are missing
        sending.send(("error", one_line(error)))
    sending.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may wait for ranks that have gone, and a broken CUDA context may hang


def run_logged(command: Sequence[str], log: Path, *, folder: Path, seconds: float, environment: dict[str, str]) -> None:
    """Runs a command in a folder with its output added to a log; it ends with this process.

    Raises:
        subprocess.CalledProcessError: It failed.
        subprocess.TimeoutExpired: It took too long; everything that it started has been killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            code = process.wait(timeout=max(1.0, seconds))
        except BaseException:
            kill_group(process.pid)
            process.wait()
            raise
    if code != 0:
        raise subprocess.CalledProcessError(code, command)


def die_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it ends, however that ends."""
    with_kill, pr_set_pdeathsig = 9, 1
    try:
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, with_kill)
    except (AttributeError, OSError):  # not Linux: a process that outlives its parent is bounded in time anyway
        return


def kill_group(pid: int) -> None:
    """Kills the group of a process that leads one; does nothing otherwise."""
    try:
        os.killpg(pid, 9)
    except (ProcessLookupError, PermissionError):
        return


def begin_section(log: Path, name: str) -> int:
    """Writes a headline into a log; returns where what follows it starts, for ``last_lines``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"==== {name}\n")
        return file.tell()


def shorten_section(log: Path, *, since: int, most_bytes: int = 1 << 18) -> None:
    """Cuts the middle out of what a log has from a byte on, where that is longer than ``most_bytes``."""
    size = log.stat().st_size
    if size - since > most_bytes:
        with log.open("r+b") as file:
            file.seek(size - most_bytes // 2)
            end = file.read()
            file.truncate(since + most_bytes // 2)
            file.seek(0, os.SEEK_END)
            file.write(b"\n[...]\n" + end)


def last_lines(log: Path, count: int = 12, *, since: int = 0) -> str:
    """Returns the end of a log, or of what it has from a byte on; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(since)
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])
