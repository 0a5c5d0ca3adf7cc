"""One run at a time: a lock that ends with its process, and a lease for disks that do not share locks.

The launcher holds both. It starts its processes by exec, so none of them keeps the lock after the launcher's death.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

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
    """Name of the machine."""
    boot: str
    """The kernel's id of its boot."""
    pid: int
    """Process id of the launcher."""
    since: str
    """UTC, ISO 8601."""
    beat: int
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
    with (folder / "lock").open("a+") as file:
        _take(file.fileno(), path, wait_s)
        there = _lease(path)
        if there is not None and there.host != socket.gethostname() and _beats(path, there, wait_s):
            raise FolderInUseError(f"{folder} is in use by {there}; wait until it has ended, or end it there")
        ended = threading.Event()
        lease = Lease(host=socket.gethostname(), boot=boot_id(), pid=os.getpid(), since=now, beat=0)
        save(lease, path)
        thread = threading.Thread(target=_beat, args=(path, lease, ended, beat_s), name="lease", daemon=True)
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
        return "no run has it"
    if lease.host != socket.gethostname():
        return f"in use by {lease}, if that machine is up"
    if lease.pid != os.getpid():  # closing a file would give up this process's own lock
        with suppress(FileNotFoundError), (folder / "lock").open() as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return f"in use by {lease}"
        return f"no run has it: {lease} has died, and the next run goes on"
    return f"in use by {lease}"


def boot_id() -> str:
    """Returns the kernel's id of the machine's boot; empty without one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _take(handle: int, lease: Path, wait_s: float) -> None:
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= until:
                owner = _lease(lease)
                raise FolderInUseError(
                    f"{lease.parent} is in use by {owner or 'another process'}; wait until it has ended, or end it"
                ) from None
            time.sleep(0.2)
        else:
            return


def _lease(path: Path) -> Lease | None:
    try:
        return load(Lease, path)
    except InvalidFileError:
        return None


def _beats(path: Path, there: Lease, wait_s: float) -> bool:
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        time.sleep(0.2)
        now = _lease(path)
        if now is None or now != there:
            return now is not None
    return False


def _beat(path: Path, lease: Lease, ended: threading.Event, beat_s: float) -> None:
    from dataclasses import replace

    while not ended.wait(beat_s):
        lease = replace(lease, beat=lease.beat + 1)
        with suppress(MosaicError):  # a full disk must not end a run that holds the lock
            save(lease, path)
