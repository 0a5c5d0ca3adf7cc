"""One run at a time: a lock that ends with its process, and a heartbeat for disks that do not share locks.

The launcher holds both. It starts its processes by exec, so none of them keeps the lock after the launcher's death.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from mosaic.artifact import load, save
from mosaic.errors import InvalidFileError, MosaicError

BEAT_S = 5.0
WAIT_S = 15.0
"""Seconds to wait for a lock, and for a heartbeat of another machine."""


class FolderInUseError(MosaicError):
    """Another run holds the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """``lease.json``: the holder of the folder; each heartbeat touches the file."""

    host: str
    pid: int
    since: str
    """UTC, ISO 8601."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


@contextmanager
def held(folder: Path, now: str, *, wait_s: float = WAIT_S, beat_s: float = BEAT_S) -> Iterator[None]:
    """Holds the folder during the block.

    It trusts no clock of another machine: another machine's lease counts if it is touched during the wait.

    Raises:
        FolderInUseError: Another run holds it; names machine, process and start.
    """
    path, ended = folder / "lease.json", threading.Event()

    def beat() -> None:
        while not ended.wait(beat_s):
            with suppress(OSError):
                path.touch()

    try:
        lock = FileLock(folder / "lock").acquire(timeout=wait_s)
    except Timeout:
        owner = _lease(path) or "another process"
        raise FolderInUseError(f"{folder} is in use by {owner}; wait until it has ended, or end it") from None
    with lock:
        there = _lease(path)
        if there is not None and there.host != socket.gethostname() and _beats(path, wait_s):
            raise FolderInUseError(f"{folder} is in use by {there}; wait until it has ended, or end it there")
        save(Lease(host=socket.gethostname(), pid=os.getpid(), since=now), path)
        thread = threading.Thread(target=beat, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            path.unlink(missing_ok=True)


def holder(folder: Path) -> str:
    """Describes the run that holds a folder, and if it lives; acquires the lock for an instant."""
    lease = _lease(folder / "lease.json")
    if lease is None:
        return "no run holds it"
    if lease.host != socket.gethostname():
        return f"in use by {lease}, if that machine is up"
    try:
        with FileLock(folder / "lock", timeout=0):
            return f"no run holds it: {lease} has died, and the next run continues"
    except Timeout:
        return f"in use by {lease}"


def _lease(path: Path) -> Lease | None:
    try:
        return load(Lease, path)
    except InvalidFileError:
        return None


def _beats(path: Path, wait_s: float) -> bool:
    """Returns True if the file's time changes during the wait; its end also ends the wait."""
    until, before = time.monotonic() + wait_s, path.stat().st_mtime_ns
    with suppress(FileNotFoundError):
        while time.monotonic() < until:
            time.sleep(0.2)
            if path.stat().st_mtime_ns != before:
                return True
    return False
