"""Timelines as a Chrome trace, the JSON that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mosaic.artifact import write_text
from mosaic.chrome_trace import Event, Lanes, chrome_events
from mosaic.report.plan_view import slots_text
from mosaic.timeline import Timeline


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """Returns a process per timeline, each from 0 on: a thread with its steps, and a thread per lane."""
    processes = [(index, timeline.title, _lanes(timeline)) for index, timeline in enumerate(timelines, start=1)]
    content = {"displayTimeUnit": "ms", "traceEvents": chrome_events(processes)}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def write_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes ``chrome_trace(timelines)`` whole or not at all."""
    write_text(chrome_trace(timelines), path)


def _lanes(timeline: Timeline) -> Lanes:
    """Returns the steps, then the spans of each set of slots."""
    origin = min((span.start_ms for span in timeline.spans), default=0.0)
    steps: dict[int, list[float]] = {}
    lanes: dict[tuple[int, ...], list[Event]] = {}
    for span in timeline.spans:
        times = (1e3 * (span.start_ms - origin), 1e3 * (span.end_ms - origin))
        steps.setdefault(span.step, []).extend(times)
        args = {"module": span.module, "phase": span.phase, "slots": list(span.slots), "step": span.step}
        lanes.setdefault(span.slots, []).append(Event(f"{span.module} {span.phase}", span.phase, *times, args))
    whole = [Event(f"step {step}", "step", min(ts), max(ts), {"step": step}) for step, ts in sorted(steps.items())]
    names = {slots: f"slot{'s' * (len(slots) > 1)} {slots_text(slots)}" if slots else "no slot" for slots in lanes}
    return [("steps", whole), *((names[slots], lanes[slots]) for slots in sorted(lanes))]
