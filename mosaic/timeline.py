"""Measured spans of a run: on slots of a device, for reports, and on ranks, for ``mosaic doctor``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from mosaic.artifact import StrictFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(StrictFile):
    """A piece of work on one partition, or a wait for other ranks."""

    module: str
    phase: Literal["forward", "backward", "glue", "reduce"]
    """``glue`` is an operation between modules on a lane; ``reduce`` is gradient reduction over ranks."""
    slots: tuple[int, ...]
    """Empty for a wait."""
    step: int
    """Index of the training step, from 0."""
    start_ms: float
    """Milliseconds since the timeline's origin."""
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline(StrictFile):
    """Measured spans of some training steps, by start."""

    title: str
    num_slots: int
    spans: tuple[Span, ...]

    @property
    def overlap(self) -> float:
        """Share of the spans' time during which another lane was also busy, between 0 and 1."""
        total = sum(span.end_ms - span.start_ms for span in self.spans)
        edges = [(span.start_ms, 1, span.slots) for span in self.spans]
        edges += [(span.end_ms, -1, span.slots) for span in self.spans]
        running, shared, previous = Counter[tuple[int, ...]](), 0.0, 0.0
        for time, change, slots in sorted(edges):
            if len(busy := +running) > 1:
                shared += len(busy) * (time - previous)
            previous = time
            running[slots] += change
        return min(1.0, shared / total) if total > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace(StrictFile):
    """Spans of one rank in some steps."""

    schema_version: int = 6
    run: str
    """Equal for all ranks of a run."""
    rank: int
    num_ranks: int
    host: str
    spans: tuple[Span, ...]
