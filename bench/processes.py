"""Processes that end with the one that started them, bounded in time, with their output at the end of a log."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


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
    """Kills a process that leads a group, and the group."""
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
