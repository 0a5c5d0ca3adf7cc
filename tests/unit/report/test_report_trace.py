import json
from itertools import pairwise
from typing import Any

from mosaic.report.trace import chrome_trace
from mosaic.timeline import Span, Timeline


def span(module: str, slots: tuple[int, ...], start: float, end: float, phase: Any = "forward", step: int = 3) -> Span:
    return Span(module=module, phase=phase, slots=slots, step=step, start_ms=start, end_ms=end)


RUN = Timeline(
    title="colocated",
    num_slots=2,
    spans=(
        span("image", (0,), 50.0, 51.5),
        span("audio", (1,), 50.25, 53.0),
        span("loss", (0, 1), 53.0, 53.5, "glue"),
        span("image", (0,), 53.5, 56.0, "backward"),
    ),
)


def events(*timelines: Timeline) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(chrome_trace(timelines))["traceEvents"]
    return results


def complete(results: list[dict[str, Any]], category: str = "forward") -> list[dict[str, Any]]:
    return [event for event in results if event["ph"] == "X" and event["cat"] == category]


def test_a_span_becomes_a_complete_event_in_microseconds_from_the_runs_start() -> None:
    audio = next(event for event in complete(events(RUN)) if event["name"] == "audio forward")
    assert (audio["ts"], audio["dur"], audio["pid"]) == (250.0, 2750.0, 1)
    assert audio["args"] == {"module": "audio", "phase": "forward", "slots": [1], "step": 3}


def test_events_of_one_thread_never_overlap() -> None:
    crossing = (span("a", (0,), 0, 2), span("b", (0,), 1, 3), span("c", (0,), 2, 4), span("d", (0,), 1.5, 1.7))
    results = complete(events(Timeline(title="x", num_slots=1, spans=crossing)))
    assert len(results) == 4
    for thread in {event["tid"] for event in results}:
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in results if e["tid"] == thread)
        assert all(first[1] <= second[0] for first, second in pairwise(row))
