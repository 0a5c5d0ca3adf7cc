"""The frozen rows: those of the recipe's folder, and those that promoted days have added in the place of worn ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mosaic.artifact import load
from mosaic.retrain.folder import Folder


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPart:
    """Rows of one data folder."""

    path: str
    """Relative to the recipe's folder."""
    added: str
    """The day that added them; empty for those of the beginning."""
    rows: tuple[int, ...] | None
    """Their indices; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRows:
    """``frozen.json``: which rows versions are compared on."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    parts: tuple[FrozenPart, ...]
    """In the order in which they are scored."""
    looks: int = 0
    """Decisions made on them since rows last changed."""
    day: str = ""
    """The last day that decided or changed them."""

    def without(self, leave: frozenset[int], sizes: tuple[int, ...]) -> Iterator[FrozenPart]:
        """Yields what stays.

        Args:
            leave: Places in the order in which rows are scored.
            sizes: Rows of each part.
        """
        first = 0
        for part, size in zip(self.parts, sizes, strict=True):
            rows = part.rows if part.rows is not None else tuple(range(size))
            stay = tuple(row for place, row in enumerate(rows, start=first) if place not in leave)
            first += len(rows)
            if stay:
                yield FrozenPart(path=part.path, added=part.added, rows=stay if len(stay) < size else part.rows)


def frozen_rows(folder: Folder, path: str) -> FrozenRows:
    """Returns the frozen rows; all of the recipe's folder where nothing was ever added."""
    if folder.frozen.is_file():
        return load(FrozenRows, folder.frozen)
    return FrozenRows(parts=(FrozenPart(path=path, added="", rows=None),))
