"""A picture of measured timelines with a lane per slot, and a Chrome trace for ui.perfetto.dev."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from mosaic.artifact import write_text
from mosaic.plan import Plan
from mosaic.report.figure import GLUE, OUTSIDE, SHADES, Bar, Panel, colors_of, lane_figure, lighter
from mosaic.report.plan_view import ms_text, slot_runs, slots_text
from mosaic.timeline import Span, Timeline

_Steps = Mapping[int, Sequence[Span]]
_MARGIN = 0.08
"""Margin above and below the bars of a lane, as a share."""


def timeline_figure(
    timelines: Sequence[Timeline], *, plan: Plan | None = None, subtitle: str = "", num_steps: int = 2
) -> Any:
    """Returns a figure of stacked measured timelines, each from 0, with a common axis in milliseconds.

    Forwards have the module's colour, backwards a lighter shade, glue is grey, and idle time is white. A step lasts
    from its first span's start to its last span's end. Time between steps (optimizer, data) has a grey background and
    does not count.

    Args:
        timelines: Timelines from the top; may be empty.
        plan: Plan whose colours to use, and whose predicted step to show below the axis.
        subtitle: Text below the title, such as machine and date.
        num_steps: Number of consecutive complete steps to draw, nearest to the median length.

    Raises:
        MosaicError: matplotlib is missing.
    """
    steps = [choose_steps(timeline, num_steps) for timeline in timelines]
    spans = [span for selected in steps for span in chain(*selected.values())]
    modules = {span.module: None for span in spans if span.phase != "glue"}
    colors = colors_of([*(p.module for p in plan.placements), *modules] if plan else modules)
    entries = {name: colors[name] for name in colors if name in modules} | SHADES
    entries |= {"glue": GLUE} if any(span.phase == "glue" for span in spans) else {}
    entries |= {"outside steps": OUTSIDE}
    axis = "milliseconds since the first step shown"
    if plan is not None:
        axis += f"\nthe plan predicted {ms_text(plan.predicted_ms)} ms per step for the modules alone (not measured)"
    return lane_figure(
        [_panel(timeline, selected, colors) for timeline, selected in zip(timelines, steps, strict=True)],
        title="Timeline (measured)",
        subtitle=subtitle,
        legend=entries,
        axis=axis,
        lane_inches=0.42,
    )


def _panel(timeline: Timeline, steps: _Steps, colors: Mapping[str, str]) -> Panel:
    origin = min((span.start_ms for span in chain(*steps.values())), default=0.0)
    lanes = [f"slot {slot}" for slot in range(timeline.num_slots)]
    lanes += ["no slot"] if any(not span.slots for span in timeline.spans) else []
    brackets, bars = [], list[Bar]()
    for step, spans in steps.items():
        start, length = min(span.start_ms for span in spans) - origin, _length_ms(spans)
        brackets.append((start, start + length, (f"step {step}: {ms_text(length)} ms", f"{ms_text(length)} ms")))
        for span in sorted(spans, key=lambda span: span.phase != "glue"):  # modules on top of glue
            color = GLUE if span.phase == "glue" else colors[span.module]
            bars += [
                Bar(
                    start_ms=span.start_ms - origin,
                    end_ms=span.end_ms - origin,
                    low=first + _MARGIN,
                    height=count - 2 * _MARGIN,
                    color=lighter(color) if span.phase == "backward" else color,
                    edge=color,
                    label="" if span.phase == "glue" else span.module,
                    gid=f"{span.module}/{span.phase}/{step}",
                )
                for first, count in slot_runs(span.slots) or ((len(lanes) - 1, 1),)
            ]
    fact = f"overlap {timeline.overlap:.0%} (share of lane time with another lane busy)"
    if (num_whole := len(whole_steps(timeline))) > len(steps):
        fact += f"; shown: {len(steps)} of {num_whole} steps, nearest to the median"
    fact = fact if timeline.spans else "nothing was recorded"
    return Panel(title=f"{timeline.title}: {fact}", lanes=lanes, spans=brackets, bars=bars)


def choose_steps(timeline: Timeline, num_steps: int) -> dict[int, tuple[Span, ...]]:
    """Returns the spans of up to ``num_steps`` consecutive complete steps nearest to the median length.

    Otherwise a slow step, or a pause between steps, would determine the scale.
    """
    complete = whole_steps(timeline)
    runs = [complete[first : first + num_steps] for first in range(max(1, len(complete) - num_steps + 1))]
    lengths = [_length_ms([span for _, spans in run for span in spans]) for run in runs]
    middle = statistics.median(lengths)
    nearest = min(range(len(runs)), key=lambda index: (abs(lengths[index] - middle), -index))
    return dict(runs[nearest])


def whole_steps(timeline: Timeline) -> list[tuple[int, tuple[Span, ...]]]:
    """Returns the steps with all usual modules and phases, in order; a recording may start within a step."""
    steps: dict[int, list[Span]] = {}
    for span in timeline.spans:
        steps.setdefault(span.step, []).append(span)
    work = {step: frozenset((s.module, s.phase) for s in spans if s.phase != "glue") for step, spans in steps.items()}
    counts = Counter(work.values())
    usual = max(counts, key=lambda ran: (counts[ran], len(ran)), default=frozenset())
    return [(step, tuple(steps[step])) for step in sorted(steps) if work[step] >= usual]


def _length_ms(spans: Sequence[Span]) -> float:
    return max((span.end_ms for span in spans), default=0.0) - min((span.start_ms for span in spans), default=0.0)


def write_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes a process per timeline, each from 0: a thread with its steps, and a thread per lane.

    "Trace Event Format" (Google, 2016): complete events ``X`` and metadata events ``M``. Events of a thread must not
    overlap in viewers, so the later of two overlapping events gets another thread.
    """
    events = list[dict[str, Any]]()
    for process, timeline in enumerate(timelines, start=1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.title}})
        threads = [(lane, row) for lane, own in _lanes(timeline).items() for row in _rows(own)]
        for thread, (lane, row) in enumerate(threads, start=1):
            where = {"pid": process, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": lane}})
            events += [{"ph": "X", **where, **event} for event in row]
    write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=1, allow_nan=False) + "\n", path)


def _lanes(timeline: Timeline) -> dict[str, list[dict[str, Any]]]:
    """Returns the events of the steps, then of each lane, by title."""
    origin = min((span.start_ms for span in timeline.spans), default=0.0)
    steps: dict[int, list[Span]] = {}
    for span in timeline.spans:
        steps.setdefault(span.step, []).append(span)
    lanes = {"steps": [_event(f"step {step}", "step", spans, origin, step=step) for step, spans in steps.items()]}
    for span in sorted(timeline.spans, key=lambda span: span.slots):
        title = f"slot{'s' * (len(span.slots) > 1)} {slots_text(span.slots)}" if span.slots else "no slot"
        facts = {"module": span.module, "phase": span.phase, "slots": list(span.slots), "step": span.step}
        event = _event(f"{span.module} {span.phase}", span.phase, [span], origin, **facts)
        lanes.setdefault(title, []).append(event)
    return lanes


def _event(name: str, category: str, spans: Sequence[Span], origin_ms: float, **facts: Any) -> dict[str, Any]:
    """Returns the event from the start of spans to their end, in microseconds with nanosecond precision."""
    start = round(1e3 * (min(span.start_ms for span in spans) - origin_ms), 3)
    end = round(1e3 * (max(span.end_ms for span in spans) - origin_ms), 3)
    return {"name": name, "cat": category, "ts": start, "dur": round(end - start, 3), "args": facts}


def _rows(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Distributes events over the fewest rows without overlap."""
    rows: list[list[dict[str, Any]]] = []
    for event in sorted(events, key=lambda event: (event["ts"], event["dur"])):
        # half a nanosecond allows for the rounding of ts + dur
        row = next((row for row in rows if row[-1]["ts"] + row[-1]["dur"] <= event["ts"] + 5e-4), None)
        if row is None:
            rows.append(row := [])
        row.append(event)
    return rows
