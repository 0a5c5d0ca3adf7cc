"""Files of JSON lines: rows are added at the end, and readers skip a line that a crash has torn."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path, row: Mapping[str, Any], *, flush: bool = False) -> None:
    """Adds a row to a new or an old file; a torn line before it stays a line of its own.

    ``flush`` waits until the row is on the disk; a process that is killed loses nothing either way.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    with path.open("ab+") as file:
        torn = b""
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            torn = b"" if file.read(1) == b"\n" else b"\n"
        file.write(torn + json.dumps(row).encode() + b"\n")
        if flush:
            file.flush()
            os.fsync(file.fileno())


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the whole rows; none without a file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row


def steps_in(path: Path) -> dict[int, dict[str, Any]]:
    """Returns the last row of each ``step``: a step that is repeated after a kill has several."""
    return {row["step"]: row for row in lines_of(path) if isinstance(row.get("step"), int)}
