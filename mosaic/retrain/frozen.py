"""The frozen rows: those of the recipe's folder, and those that promoted days have added in the place of worn ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mosaic.artifact import load
from mosaic.retrain.folder import Folder
from mosaic.retrain.gate import Renewal

ROW = "row"
"""Column of scores with the rows' names, such as ``data/frozen:7``."""


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
    """Decisions made on them; rows that were never looked at lower it by their part of the set."""
    looked: str = ""
    """The last day that decided by them."""


def frozen_rows(folder: Folder, path: str) -> FrozenRows:
    """Returns the frozen rows; all of the recipe's folder where nothing was ever added."""
    if folder.frozen.is_file():
        return load(FrozenRows, folder.frozen)
    return FrozenRows(parts=(FrozenPart(path=path, added="", rows=None),))


def looked_at(rows: FrozenRows, day: str) -> FrozenRows:
    """Counts a decision; a day that is judged again after a kill counts once."""
    return rows if rows.looked == day else replace(rows, looks=rows.looks + 1, looked=day)


def renewed(rows: FrozenRows, change: Renewal, names: Sequence[str], fresh: Sequence[str], day: str) -> FrozenRows:
    """Returns the rows after a promotion; a day that does it again after a kill changes nothing.

    Args:
        rows: As they were.
        change: What joins and what leaves.
        names: Of the frozen rows that the change speaks of, in order, such as ``data/frozen:7``.
        fresh: Of the fresh rows.
        day: The day that was promoted.
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
