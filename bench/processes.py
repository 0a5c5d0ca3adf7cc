"""Child processes that end with their parent and within a time limit, and whose results so far are kept."""

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
"""Yields figures or other picklable values."""


class PartFailedError(Exception):
    """A part raised an error, died, or was ended."""

    def __init__(self, message: str, status: Status = "failed") -> None:
        super().__init__(message)
        self.status = status


def within(make: Make, seconds: float, context: BaseContext | None = None) -> Iterator[Any]:
    """Yields a part's figures from a child process that ends after ``seconds``.

    Raises:
        PartFailedError: The part did not complete.
    """
    yield from side_by_side({"its process": make}, seconds, context)


def side_by_side(makes: Mapping[str, Make], seconds: float, context: BaseContext | None = None) -> Iterator[Any]:
    """Yields values of concurrent named processes, which end after ``seconds``; by default forked.

    Raises:
        PartFailedError: One of them did not complete.
    """
    if seconds <= 0:
        raise PartFailedError("no time was left")
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
                raise PartFailedError(f"{name} did not end within {seconds:g} s", "timed out")
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
    except BaseException as error:  # becomes the reason of missing figures
        sending.send(("error", one_line(error)))
    sending.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may wait for dead ranks, and a broken CUDA context may hang


def run_logged(command: Sequence[str], log: Path, *, folder: Path, seconds: float, environment: dict[str, str]) -> None:
    """Runs a command in a folder and appends its output to a log; it ends with this process.

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
    """Makes Linux kill this process when its parent ends."""
    with_kill, pr_set_pdeathsig = 9, 1
    try:
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, with_kill)
    except (AttributeError, OSError):  # not Linux; a time limit ends the process
        return


def kill_group(pid: int) -> None:
    """Kills the group of a process if it leads one."""
    try:
        os.killpg(pid, 9)
    except (ProcessLookupError, PermissionError):
        return


def begin_section(log: Path, name: str) -> int:
    """Writes a headline into a log; returns the offset after it, for ``last_lines``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"==== {name}\n")
        return file.tell()


def shorten_section(log: Path, *, since: int, most_bytes: int = 1 << 18) -> None:
    """Removes the middle of a log from a byte on if it is longer than ``most_bytes``."""
    size = log.stat().st_size
    if size - since > most_bytes:
        with log.open("r+b") as file:
            file.seek(size - most_bytes // 2)
            end = file.read()
            file.truncate(since + most_bytes // 2)
            file.seek(0, os.SEEK_END)
            file.write(b"\n[...]\n" + end)


def last_lines(log: Path, count: int = 12, *, since: int = 0) -> str:
    """Returns the last lines of a log from a byte on; empty without a log."""
    try:
        with log.open("rb") as file:
            file.seek(since)
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])
