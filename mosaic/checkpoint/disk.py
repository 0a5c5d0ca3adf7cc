"""Files and folders that are complete or absent: a rename follows the flush to the disk."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path

CHUNK_BYTES = 1 << 22
"""Bytes that are read at once."""


def is_full(error: BaseException) -> bool:
    """Returns True if an error reports a full disk or an exhausted quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_flushed(content: bytes, path: Path) -> str:
    """Writes a new file, flushes it to the disk, and returns its SHA-256."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def flush_folder(path: Path) -> None:
    """Flushes the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename_flushed(old: Path, new: Path) -> None:
    """Flushes a folder and renames it; a crash leaves the old name or the new one."""
    flush_folder(old)
    old.rename(new)
    flush_folder(new.parent)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def remove_folder(path: Path) -> None:
    """Removes a folder and its content, if it exists."""
    if path.exists():
        shutil.rmtree(path)
