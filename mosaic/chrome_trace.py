"""Chrome traces: "Trace Event Format" (Google, 2016), complete events ``X`` and metadata events ``M``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One piece of work, or one wait."""

    name: str
    category: str
    start_us: float
    end_us: float
    args: dict[str, Any]


Lanes = Sequence[tuple[str, Sequence[Event]]]
"""Names of threads, and their events."""


def chrome_events(processes: Iterable[tuple[int, str, Lanes]]) -> list[dict[str, Any]]:
    """Returns the events of processes, each a number, a name and lanes, in order.

    The viewers need events of one thread not to overlap, so the later of two overlapping ones moves to a thread of its
    own next to it. Times are in microseconds, to the nanosecond; an end is rounded like the next event's start.
    """
    events = []
    for process, name, lanes in processes:
        events += [_metadata("process_name", process, 0, name=name)]
        events += [_metadata("process_sort_index", process, 0, sort_index=process)]
        rows = [(lane, index, row) for lane, own in lanes for index, row in enumerate(_rows(own))]
        for thread, (lane, index, row) in enumerate(rows, start=1):
            title = lane if index == 0 else f"{lane} ({index + 1})"
            events += [_metadata("thread_name", process, thread, name=title)]
            events += [_metadata("thread_sort_index", process, thread, sort_index=thread)]
            events += [{**event, "pid": process, "tid": thread} for event in row]
    return events


def _rows(events: Iterable[Event]) -> list[list[dict[str, Any]]]:
    """Spreads events over the fewest rows without overlap."""
    rows: list[list[dict[str, Any]]] = []
    for event in sorted(events, key=lambda event: (event.start_us, event.end_us)):
        start = round(event.start_us, 3)
        entry = {"name": event.name, "cat": event.category, "ph": "X", "ts": start, "args": event.args}
        entry["dur"] = round(round(event.end_us, 3) - start, 3)
        # Half a nanosecond forgives the rounding of ts + dur.
        row = next((row for row in rows if row[-1]["ts"] + row[-1]["dur"] <= start + 5e-4), None)
        if row is None:
            rows.append(row := [])
        row.append(entry)
    return rows


def _metadata(kind: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args}
