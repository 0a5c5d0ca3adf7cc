"""Selection of recorded steps that represent a run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from mosaic.timeline import Span, Timeline

Choice = Literal["last", "typical"]
"""The last steps, or the steps nearest to the median length."""


def choose_steps(timeline: Timeline, num_steps: int, choice: Choice = "last") -> dict[int, tuple[Span, ...]]:
    """Returns the spans of ``num_steps`` consecutive whole steps, or of all if fewer.

    ``last`` selects the last steps. ``typical`` selects those whose total is nearest to the median of all such
    runs, the later in a tie: otherwise one stalled step on a busy machine would set the scale of the picture.
    """
    whole = whole_steps(timeline)
    runs = [whole[first : first + num_steps] for first in range(max(1, len(whole) - num_steps + 1))]
    if choice == "typical" and len(runs) > 1:
        lengths = [sum(length_ms(spans) for _, spans in run) for run in runs]
        median = statistics.median(lengths)
        nearest = min(range(len(runs)), key=lambda index: (abs(lengths[index] - median), -index))
        return dict(runs[nearest])
    return dict(runs[-1])


def whole_steps(timeline: Timeline) -> list[tuple[int, tuple[Span, ...]]]:
    """Returns, in order, the steps with all modules and phases that usually run.

    A recording may begin or end inside a step, which then lacks modules or phases.
    """
    steps: dict[int, list[Span]] = {}
    for span in timeline.spans:
        steps.setdefault(span.step, []).append(span)
    work = {
        step: frozenset((span.module, span.phase) for span in spans if span.phase != "glue")
        for step, spans in steps.items()
    }
    counts = Counter(work.values())
    usual = max(counts, key=lambda ran: (counts[ran], len(ran)), default=frozenset())
    return [(step, tuple(steps[step])) for step in sorted(steps) if work[step] >= usual]


def length_ms(spans: Sequence[Span]) -> float:
    """Returns the time from the first start to the last end in milliseconds; 0 if there are no spans."""
    if not spans:
        return 0.0
    return max(span.end_ms for span in spans) - min(span.start_ms for span in spans)


def flatten(steps: Mapping[int, Iterable[Span]]) -> list[Span]:
    """Returns the spans of all steps."""
    return [span for spans in steps.values() for span in spans]
