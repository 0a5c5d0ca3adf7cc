"""Timelines as a Chrome trace, the JSON that ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016), complete events ``X`` and metadata events ``M``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mosaic.artifact import write_text
from mosaic.report.bars import slots_text
from mosaic.timeline import Timeline


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """Returns one JSON object with a process per timeline and a thread per lane.

    Each timeline starts at 0, so consecutive runs lie below each other. The first thread of a process has its
    steps. The viewers need events of one thread not to overlap, so the later of two overlapping spans moves to
    a thread of its own next to it.
    """
    events: list[dict[str, Any]] = []
    for index, timeline in enumerate(timelines):
        process = index + 1
        events.append(_metadata("process_name", process, 0, name=timeline.title))
        events.append(_metadata("process_sort_index", process, 0, sort_index=index))
        events.extend(_lanes(timeline, process))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=1, allow_nan=False) + "\n"


def write_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes ``chrome_trace(timelines)`` to ``path`` atomically.

    Raises:
        MosaicError: The folder cannot be written or the disk is full.
    """
    write_text(chrome_trace(timelines), path)


def _lanes(timeline: Timeline, process: int) -> Iterator[dict[str, Any]]:
    origin = min((span.start_ms for span in timeline.spans), default=0.0)
    lanes: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for span in timeline.spans:
        event = _event(f"{span.module} {span.phase}", span.phase, span.start_ms - origin, span.end_ms - origin)
        event["args"] = {
            "module": span.module,
            "phase": span.phase,
            "slots": list(span.slots),
            "step": span.step,
        }
        lanes.setdefault(span.slots, []).append(event)
    named = [("steps", list(_steps(timeline, origin)))]
    named += [(_lane_name(slots), lanes[slots]) for slots in sorted(lanes)]
    thread = 0
    for name, lane in named:
        for part, row in enumerate(_rows(lane)):
            thread += 1
            shown = name if part == 0 else f"{name} ({part + 1})"
            yield _metadata("thread_name", process, thread, name=shown)
            yield _metadata("thread_sort_index", process, thread, sort_index=thread)
            for event in row:
                yield {**event, "pid": process, "tid": thread}


def _lane_name(slots: tuple[int, ...]) -> str:
    if not slots:
        return "no slot"
    return f"slot{'s' if len(slots) > 1 else ''} {slots_text(slots)}"


def _steps(timeline: Timeline, origin: float) -> Iterator[dict[str, Any]]:
    for step in sorted({span.step for span in timeline.spans}):
        spans = [span for span in timeline.spans if span.step == step]
        start = min(span.start_ms for span in spans) - origin
        end = max(span.end_ms for span in spans) - origin
        yield {**_event(f"step {step}", "step", start, end), "args": {"step": step}}


def _event(name: str, category: str, start_ms: float, end_ms: float) -> dict[str, Any]:
    """A complete event in microseconds, to the nanosecond; its end is rounded like the next event's start."""
    start = round(start_ms * 1000, 3)
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": round(round(end_ms * 1000, 3) - start, 3)}


def _rows(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Spreads events over the fewest rows without overlap in a row."""
    rows: list[list[dict[str, Any]]] = []
    for event in sorted(events, key=lambda event: (event["ts"], event["dur"])):
        for row in rows:
            # Half a nanosecond forgives the rounding of ts + dur.
            if row[-1]["ts"] + row[-1]["dur"] <= event["ts"] + 5e-4:
                row.append(event)
                break
        else:
            rows.append([event])
    return rows


def _metadata(kind: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args}
