"""A record of when things ran, on which slots: recorded by the engine, drawn and exported by the reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mosaic.device import StrictFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(StrictFile):
    """One piece of work on one partition."""

    module: str
    phase: Literal["forward", "backward", "glue"]
    """Half of the step; ``glue`` is an operation between modules that followed its branch."""
    slots: tuple[int, ...]
    """Slots that it held."""
    step: int
    """Index of the training step, from 0."""
    start_ms: float
    """Milliseconds since the timeline's origin."""
    end_ms: float
    """Milliseconds since the timeline's origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline(StrictFile):
    """Measured spans of some training steps, in the order in which they started."""

    title: str
    """Name of the run, such as ``plain`` or ``colocated``."""
    num_slots: int
    """Slots of the device."""
    spans: tuple[Span, ...]

    @property
    def overlap(self) -> float:
        """Share of busy lane time during which another lane was busy too, between 0 and 1.

        Lane time is the length of all spans together. Two spans of one lane (same slots) never count as
        overlapping each other.
        """
        total = sum(span.end_ms - span.start_ms for span in self.spans)
        if total <= 0:
            return 0.0
        edges: list[tuple[float, int, tuple[int, ...]]] = []
        for span in self.spans:
            edges += [(span.start_ms, 1, span.slots), (span.end_ms, -1, span.slots)]
        edges.sort(key=lambda edge: (edge[0], edge[1]))
        running: dict[tuple[int, ...], int] = {}
        shared = 0.0
        previous = edges[0][0]
        for time, change, slots in edges:
            busy = sum(1 for count in running.values() if count > 0)
            if busy > 1:
                shared += busy * (time - previous)
            previous = time
            running[slots] = running.get(slots, 0) + change
        return min(1.0, shared / total)
