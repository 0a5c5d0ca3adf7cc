"""A day folder: ``rows.safetensors`` (uint8 levels), ``index.jsonl`` (a line a row), and ``_SUCCESS``, written last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mosaic.errors import MosaicError

ARRAYS = "rows.safetensors"
INDEX = "index.jsonl"
READY = "_SUCCESS"


@dataclass(frozen=True, slots=True, kw_only=True)
class DayRow:
    """One row; missing modalities are None."""

    label: int
    """Label in the index, 0 to 9; it may be wrong."""
    site: str
    """Site of the recording."""
    cluster: str
    """Writer, speaker or wearer; rows of one cluster resemble each other."""
    image: NDArray[np.uint8] | None = None
    """(1, 8, 8), 0 (paper) to 255 (ink)."""
    audio: NDArray[np.uint8] | None = None
    """(40, 32) log-mel, 0 (silence) to 255; a frame is 16 ms."""
    imu: NDArray[np.uint8] | None = None
    """(6, 48): acceleration and rotation about three axes; 128 is none."""


def write_rows(folder: Path, rows: list[DayRow]) -> None:
    """Writes an immutable folder.

    Raises:
        MosaicError: The folder exists already.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise MosaicError(f"{folder} is there already, and days never change; remove it or name another") from error
    stored: dict[str, list[NDArray[np.uint8]]] = {}
    lines = []
    for row in rows:
        line: dict[str, str | int] = {"label": row.label, "site": row.site, "cluster": row.cluster}
        for name, values in (("image", row.image), ("audio", row.audio), ("imu", row.imu)):
            if values is not None:
                line[name] = len(stored.setdefault(name, []))
                stored[name].append(values)
        lines.append(json.dumps(line))
    save_file({name: np.stack(values) for name, values in stored.items()}, folder / ARRAYS)
    (folder / INDEX).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / READY).touch()
