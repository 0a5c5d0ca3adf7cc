"""One run of a folder at a time, by a lock that ends with its process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mosaic.artifact import write_text
from mosaic.errors import MosaicError

WAIT_S = 15.0


class FolderInUseError(MosaicError):
    """Another run holds the folder."""


@contextmanager
def held(folder: Path, now: str, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Holds the folder during the block; ``now`` is the start in the message to other runs."""
    try:
        lock = FileLock(folder / "lock").acquire(timeout=wait_s)
    except Timeout:
        raise FolderInUseError(f"{folder} is {holder(folder)}; wait until it has ended, or end it") from None
    with lock:
        write_text(f"process {os.getpid()} on {socket.gethostname()} since {now}", folder / "holder")
        try:
            yield
        finally:
            (folder / "holder").unlink()


def holder(folder: Path) -> str:
    """Describes the run that holds a folder; acquires the lock for an instant."""
    path = folder / "holder"
    run = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        with FileLock(folder / "lock", timeout=0):
            return f"no run holds it: {run} has died, and the next run continues" if run else "no run holds it"
    except Timeout:
        return f"in use by {run or 'another process'}"
    except OSError as error:  # such as a user who may only read
        return f"its lock cannot be opened ({error.strerror}), so a run may hold it"
