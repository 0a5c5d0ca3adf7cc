"""The frozen rows: those of the recipe's folder, and those of promoted days that replaced worn rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mosaic.artifact import load
from mosaic.retrain.folder import Folder
from mosaic.retrain.gate import Renewal

ROW = "row"
"""Column of scores with row names, such as ``data/frozen:7``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPart:
    """Rows of one data folder."""

    path: str
    """Relative to the recipe's folder."""
    added: str
    """The day that added them; empty for the first rows."""
    rows: tuple[int, ...] | None
    """Indices; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRows:
    """``frozen.json``: the rows that compare versions."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    parts: tuple[FrozenPart, ...]
    """Parts in scoring order."""
    looks: int = 0
    """Decisions made on the set; new rows lower it by their part of the set."""
    looked: str = ""
    """The last day that used the set."""


def frozen_rows(folder: Folder, path: str) -> FrozenRows:
    """Returns the frozen rows; all of the recipe's folder before any was added."""
    if folder.frozen.is_file():
        return load(FrozenRows, folder.frozen)
    return FrozenRows(parts=(FrozenPart(path=path, added="", rows=None),))


def looked_at(rows: FrozenRows, day: str) -> FrozenRows:
    """Counts a decision; a day counts once, even if it is judged again after a kill."""
    return rows if rows.looked == day else replace(rows, looks=rows.looks + 1, looked=day)


def renewed(rows: FrozenRows, change: Renewal, names: Sequence[str], fresh: Sequence[str], day: str) -> FrozenRows:
    """Returns the rows after a promotion; a repeat after a kill changes nothing.

    Args:
        rows: The rows before.
        change: Rows that join and rows that leave.
        names: Names of the frozen rows that the change indexes, such as ``data/frozen:7``.
        fresh: Names of the fresh rows.
        day: The promoted day.
    """
    if any(part.added == day for part in rows.parts):
        return rows
    stay = [name for place, name in enumerate(names) if place not in set(change.leave)]
    parts = []
    for part in rows.parts:
        of_part = _rows_in(stay, part.path)
        if of_part:
            parts.append(replace(part, rows=of_part if change.leave else part.rows))
    joining = [fresh[place] for place in change.join]
    for path in dict.fromkeys(name.rpartition(":")[0] for name in joining):
        parts.append(FrozenPart(path=path, added=day, rows=_rows_in(joining, path)))
    looks = round(rows.looks * len(stay) / max(1, len(stay) + len(joining)))
    return replace(rows, parts=tuple(parts), looks=looks)


def _rows_in(names: Sequence[str], path: str) -> tuple[int, ...]:
    return tuple(int(name.rpartition(":")[2]) for name in names if name.rpartition(":")[0] == path)
