"""Task graphs for ``mosaic._search``, checked and compiled once."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from mosaic.search_extension import load_search

if TYPE_CHECKING:
    from mosaic import _search


class ActionKind(StrEnum):
    """Kind of computation, by its letter in schedules."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


KINDS = {kind: number for number, kind in enumerate(ActionKind)}
"""The extension's numbers of task kinds."""
_MAX_WHOLE = 2**63


def compile_tasks(
    tasks: Sequence[object],
    waits: Sequence[object],
    *,
    rank_of: Sequence[int],
    base_bytes: Sequence[int],
    limit_bytes: Sequence[int],
) -> _search.Tasks:
    """Checks tasks and waits (``Task`` and ``Wait``) and compiles them for searches.

    Raises:
        ValueError: A figure is not a whole number or out of range, or tasks wait for each other in a circle.
    """
    columns = [_column("task", tasks, name) for name in ("row", "microbatch", "group", "time_ns", *_BYTES)]
    columns.insert(1, array("q", [KINDS[kind] for kind in map(operator.attrgetter("kind"), tasks)]))
    compiled: _search.Tasks = load_search().Tasks(
        columns,
        [_column("wait", waits, name) for name in ("source", "target", "lag_ns")],
        rank_of=_whole("rank_of", rank_of),
        base_bytes=_whole("base_bytes", base_bytes),
        limit_bytes=_whole("limit_bytes", limit_bytes),
    )
    return compiled


_BYTES = ("takes_bytes", "frees_bytes")


def _column(what: str, of: Iterable[object], name: str) -> array[int]:
    read = operator.attrgetter(name)
    try:
        return array("q", map(read, of))
    except (TypeError, OverflowError):
        for index, each in enumerate(of):
            _whole(f"{name} of {what} {index}", [read(each)])
        raise


def _whole(name: str, values: Sequence[int]) -> array[int]:
    for value in values:
        if not hasattr(value, "__index__") or not -_MAX_WHOLE <= value < _MAX_WHOLE:
            raise ValueError(f"{name} is {value!r}; use a whole number of at most 63 bits")
    return array("q", values)
