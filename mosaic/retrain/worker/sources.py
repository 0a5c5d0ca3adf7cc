"""A day's list of data, frozen before its first step: folders, rows, and held-out rows.

Files that arrive later belong to the next day. The list holds each file's size and the digest of a folder's content; a
restart compares the sizes, so data that changes during a run is an error. No torch at import: the launcher reads it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from mosaic.checkpoint.folder import sha256_of
from mosaic.errors import MosaicError
from mosaic.retrain.worker.positions import words_at, words_of

Kind = Literal["new", "replay", "frozen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    kind: Kind
    """``new``: today's; ``replay``: a promoted day's; ``frozen``: rows that compare versions."""
    day: str
    """Date; empty for frozen rows."""
    path: str
    """Relative to the recipe's folder."""
    files: dict[str, int]
    """Size of each file in bytes, by its name relative to ``path``."""
    digest: str
    """SHA-256 of the files' names and content."""
    rows: int = 0
    trained: int = 0
    """Rows for training; the others are held out for the comparison on fresh rows."""
    samples: int = 0
    """Samples of the day that come from it."""

    @property
    def name(self) -> str:
        """Such as ``new 2026-11-22``."""
        return f"{self.kind} {self.day}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """``sources.json``: the training data and the steps of a day."""

    SCHEMA_VERSION: ClassVar[int] = 2

    schema_version: int = SCHEMA_VERSION
    day: str
    seed: int
    """Seed of the order and of the held-out rows."""
    fresh_share: float
    """Held-out part of the rows."""
    batch: int
    num_steps: int
    sources: tuple[SourceRecord, ...]
    """New ones first."""
    frozen: SourceRecord
    """Rows that compare versions."""

    def drawn(self, steps: int) -> tuple[int, ...]:
        """Returns each source's number of samples in the first ``steps`` steps, which its samples are spread over."""
        return tuple(round(source.samples * steps / self.num_steps) for source in self.sources)

    def of_kind(self, kind: Kind) -> tuple[SourceRecord, ...]:
        return tuple(source for source in self.sources if source.kind == kind)


def record_of(root: Path, path: Path, *, kind: Kind, day: str, known: Mapping[str, SourceRecord]) -> SourceRecord:
    """Lists a data folder; ``known`` has the records of earlier days by path, whose digests equal sizes reuse.

    Raises:
        MosaicError: The folder is missing, empty, or changed since a day trained on it.
    """
    if not path.is_dir():
        raise MosaicError(f"there is no data folder {path}; see [sources] in the recipe")
    files = {
        file.relative_to(path).as_posix(): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()
    }
    if not files:
        raise MosaicError(f"the data folder {path} is empty; put the day's files there, and the ready file last")
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    if (before := known.get(name)) is not None:
        if before.files != files:
            was = before.files
            changed = min(file for file in was | files if was.get(file) != files.get(file))
            raise MosaicError(
                f"{path} changed since a day trained on it ({changed} had {was.get(changed, 'no')} bytes and has "
                f"{files.get(changed, 'no')}); folders of days must not change: restore it, or put new files into a "
                "day of their own"
            )
        return replace(before, kind=kind, day=day, samples=0)
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file}\0{sha256_of(path / file)}\0".encode())
    return SourceRecord(kind=kind, day=day, path=name, files=files, digest=digest.hexdigest())


def held_out_rows(data: Any, *, share: float, seed: int, day: str) -> np.ndarray:
    """Returns the mask of a day's held-out rows: whole clusters, drawn by seed and day.

    ``data.cluster(index)``, if present, names the cluster of a row (a recording, a robot, a shop); otherwise each row
    is its own cluster.
    """
    cluster = getattr(data, "cluster", None)
    if cluster is None:
        words = words_at(words_of("held out", seed, day)[0], np.arange(len(data), dtype=np.uint64))
        return words < np.uint64(share * 2**64)
    names = [str(cluster(index)) for index in range(len(data))]
    digests = {name: hashlib.sha256(f"{seed}/{day}/{name}".encode()).digest() for name in set(names)}
    return np.array([int.from_bytes(digests[name][:8], "big") / 2**64 < share for name in names], dtype=bool)


def trained_rows(record: SourceRecord, data: Any, sources: Sources) -> Any:
    """Returns the training rows of a data set.

    Raises:
        MosaicError: The number of rows changed since the day's list was made.
    """
    from torch.utils.data import Subset

    out = held_out_rows(data, share=sources.fresh_share, seed=sources.seed, day=record.day)
    if (len(data), len(data) - int(out.sum())) != (record.rows, record.trained):
        raise MosaicError(
            f"{record.path} has {len(data)} rows now and had {record.rows} when the day began, {record.trained} of "
            "them to train on; restore it. Rows that arrive later belong to the next day"
        )
    return Subset(data, array("q", np.flatnonzero(~out).astype(np.int64).tobytes())) if out.any() else data
