"""One run at a time: a lock that ends with its process, and a lease beside it for disks that share no locks.

The launcher holds both. It starts its processes by exec, so that none of them keeps the lock after it was killed.
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
"""Seconds between two beats of a lease."""
WAIT_S = 15.0
"""Seconds to wait for a lock, and for a beat of a lease of another machine."""


class FolderInUseError(MosaicError):
    """Another run has the folder; says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """``lease.json``: who has the folder."""

    host: str
    """Name of the machine."""
    boot: str
    """Its boot, as the kernel names it."""
    pid: int
    """The launcher."""
    since: str
    """UTC, ISO 8601."""
    beat: int
    """Grows as long as it lives."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


@contextmanager
def held(folder: Path, now: str, *, wait_s: float = WAIT_S, beat_s: float = BEAT_S) -> Iterator[None]:
    """Holds the folder as long as the block runs.

    No clock of another machine is believed: a lease of another machine counts if it beats while we look.

    Raises:
        FolderInUseError: Another run has it; names machine, process and since when.
    """
    path = folder / "lease.json"
    with (folder / "lock").open("a+") as file:
        _take(file.fileno(), path, wait_s)
        there = _lease(path)
        if there is not None and there.host != socket.gethostname() and _beats(path, there, wait_s):
            raise FolderInUseError(f"{folder} is in use by {there}; wait until it has ended, or end it there")
        ended = threading.Event()
        mine = Lease(host=socket.gethostname(), boot=boot_id(), pid=os.getpid(), since=now, beat=0)
        save(mine, path)
        thread = threading.Thread(target=_beat, args=(path, mine, ended, beat_s), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(OSError):
                path.unlink()


def holder(folder: Path) -> str:
    """Says which run has a folder, and whether its process lives; takes the lock for an instant to find out."""
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
    """Returns the kernel's name for this boot of the machine; empty where it has none."""
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
                who = _lease(lease)
                raise FolderInUseError(
                    f"{lease.parent} is in use by {who or 'another process'}; wait until it has ended, or end it"
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
