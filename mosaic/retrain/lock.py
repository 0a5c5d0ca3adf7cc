"""One run at a time: a lock that ends with its process, and a lease for disks that do not share locks.

The launcher holds both. It starts its processes by exec, so none of them keeps the lock after the launcher's death.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from mosaic.artifact import load, save
from mosaic.errors import InvalidFileError, MosaicError

BEAT_S = 5.0
"""Seconds between heartbeats of a lease."""
WAIT_S = 15.0
"""Seconds to wait for a lock, and for a heartbeat of another machine's lease."""


class FolderInUseError(MosaicError):
    """Another run holds the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """``lease.json``: the holder of the folder."""

    host: str
    pid: int
    since: str
    """UTC, ISO 8601."""
    beat: int = 0
    """Counts heartbeats."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


@contextmanager
def held(folder: Path, now: str, *, wait_s: float = WAIT_S, beat_s: float = BEAT_S) -> Iterator[None]:
    """Holds the folder during the block.

    It trusts no clock of another machine: another machine's lease counts if its heartbeat changes during the wait.

    Raises:
        FolderInUseError: Another run holds it; names machine, process and start.
    """
    path = folder / "lease.json"
    try:
        lock = FileLock(folder / "lock").acquire(timeout=wait_s)
    except Timeout:
        owner = _lease(path) or "another process"
        raise FolderInUseError(f"{folder} is in use by {owner}; wait until it has ended, or end it") from None
    ended = threading.Event()
    lease = Lease(host=socket.gethostname(), pid=os.getpid(), since=now)

    def beat() -> None:
        current = lease
        while not ended.wait(beat_s):
            current = replace(current, beat=current.beat + 1)
            with suppress(MosaicError):  # a full disk must not end a run that holds the lock
                save(current, path)

    with lock:
        there = _lease(path)
        if there is not None and there.host != lease.host and _beats(path, there, wait_s):
            raise FolderInUseError(f"{folder} is in use by {there}; wait until it has ended, or end it there")
        save(lease, path)
        thread = threading.Thread(target=beat, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(OSError):
                path.unlink()


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


def boot_id() -> str:
    """Returns the kernel's id of the machine's boot; empty without one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _lease(path: Path) -> Lease | None:
    try:
        return load(Lease, path)
    except InvalidFileError:
        return None


def _beats(path: Path, there: Lease, wait_s: float) -> bool:
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        time.sleep(0.2)
        if (now := _lease(path)) != there:
            return now is not None
    return False
