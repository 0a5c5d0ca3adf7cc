"""Timelines as a Chrome trace, the JSON that ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016), complete events ``X`` and metadata events ``M``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mosaic.artifact import write_text
from mosaic.rank_trace import metadata, rows_without_overlap
from mosaic.report.plan_view import slots_text
from mosaic.timeline import Timeline


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """Returns one JSON object with a process per timeline and a thread per lane.

    Each timeline starts at 0, so consecutive runs lie below each other. The first thread of a process has its
    steps. The viewers need events of one thread not to overlap, so the later of two overlapping spans moves to
    a thread of its own next to it.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines, start=1):
        events += [metadata("process_name", process, 0, name=timeline.title)]
        events += [metadata("process_sort_index", process, 0, sort_index=process)]
        thread = 0
        for name, lane in _lanes(timeline):
            for index, row in enumerate(rows_without_overlap(lane)):
                thread += 1
                shown = name if index == 0 else f"{name} ({index + 1})"
                events += [metadata("thread_name", process, thread, name=shown)]
                events += [metadata("thread_sort_index", process, thread, sort_index=thread)]
                events += [{**event, "pid": process, "tid": thread} for event in row]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=1, allow_nan=False) + "\n"


def write_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes ``chrome_trace(timelines)`` to ``path`` atomically.

    Raises:
        MosaicError: The folder cannot be written or the disk is full.
    """
    write_text(chrome_trace(timelines), path)


def _lanes(timeline: Timeline) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields a name and the events of the steps, then of each set of slots."""
    origin = min((span.start_ms for span in timeline.spans), default=0.0)
    steps: dict[int, list[float]] = {}
    lanes: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for span in timeline.spans:
        steps.setdefault(span.step, []).extend((span.start_ms, span.end_ms))
        event = _event(f"{span.module} {span.phase}", span.phase, span.start_ms - origin, span.end_ms - origin)
        args = {"module": span.module, "phase": span.phase, "slots": list(span.slots), "step": span.step}
        lanes.setdefault(span.slots, []).append({**event, "args": args})
    yield (
        "steps",
        [
            {**_event(f"step {step}", "step", min(times) - origin, max(times) - origin), "args": {"step": step}}
            for step, times in sorted(steps.items())
        ],
    )
    for slots in sorted(lanes):
        yield f"slot{'s' if len(slots) > 1 else ''} {slots_text(slots)}" if slots else "no slot", lanes[slots]


def _event(name: str, category: str, start_ms: float, end_ms: float) -> dict[str, Any]:
    """A complete event in microseconds, to the nanosecond; its end is rounded like the next event's start."""
    start = round(start_ms * 1000, 3)
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": round(round(end_ms * 1000, 3) - start, 3)}
