"""Files and folders that are whole or not there: flushed to the disk before they get the name that counts."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path

CHUNK_BYTES = 1 << 22
"""Bytes that are read at once."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or what a user may have of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_flushed(content: bytes, path: Path) -> str:
    """Writes a new file, flushes it to the disk, and returns its SHA-256."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def flush_folder(path: Path) -> None:
    """Makes the names in a folder last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename_flushed(old: Path, new: Path) -> None:
    """Gives a flushed folder its name; it has the old name or the new one, whatever happens."""
    flush_folder(old)
    old.rename(new)
    flush_folder(new.parent)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, which is never held whole."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


def remove_folder(path: Path) -> None:
    """Removes a folder and what is in it; one that is not there is fine."""
    if path.exists():
        shutil.rmtree(path)
