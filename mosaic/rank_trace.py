"""The computing and waiting of one of several ranks, as a file: a Chrome trace with the data to compare ranks.

The file opens in ui.perfetto.dev like any trace ("Trace Event Format", Google, 2016); its ``mosaic`` member holds the
rank, its run, its clock's offset from rank 0's, and the spans.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from mosaic.artifact import load, to_json, write_text
from mosaic.device import StrictFile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpan(StrictFile):
    """One piece of work, or one wait for other ranks."""

    kind: Literal["compute", "wait"]
    module: str
    """Module of the work."""
    phase: str
    """``forward``, ``backward``, ``reduce`` or ``agreement``."""
    step: int
    """Index of the training step, from 0."""
    start_us: float
    """Microseconds on rank 0's clock."""
    end_us: float
    """Microseconds on rank 0's clock."""
    expected_ms: float = 0.0
    """Planned time; 0 without a plan. In a pipeline each rank has layers of its own to compute."""

    def __post_init__(self) -> None:
        if not self.start_us <= self.end_us < float("inf"):
            raise ValueError(f"a span ends at {self.end_us} us, before its start at {self.start_us} us")

    @property
    def duration_ms(self) -> float:
        """Time from start to end."""
        return (self.end_us - self.start_us) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace(StrictFile):
    """Spans of one rank in some steps."""

    SCHEMA_VERSION: ClassVar[int] = 2

    schema_version: int = 2
    run: str
    """Equal for all ranks of one start."""
    rank: int
    num_ranks: int
    """Number of ranks of the run."""
    host: str
    """Name of the rank's machine."""
    clock_offset_us: float
    """Difference between rank 0's clock and its own, which the times contain."""
    clock_error_us: float
    """Bound on the offset's error: half the time of the fastest message there and back."""
    spans: tuple[RankSpan, ...]
    """By start."""

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            MosaicError: The folder cannot be written or the disk is full.
        """
        events = [metadata("process_name", self.rank, 0, name=f"rank {self.rank} ({self.host})")]
        for thread, (kind, name) in enumerate((("compute", "computes"), ("wait", "waits")), start=1):
            own = [_event(span) for span in self.spans if span.kind == kind]
            for index, row in enumerate(rows_without_overlap(own)):
                place = {"pid": self.rank, "tid": thread + 10 * index}
                events.append(metadata("thread_name", self.rank, place["tid"], name=name))
                events += [{**event, **place} for event in row]
        content = {"displayTimeUnit": "ms", "mosaic": json.loads(to_json(self)), "traceEvents": events}
        write_text(json.dumps(content) + "\n", path)

    @staticmethod
    def read(path: Path) -> RankTrace:
        """Reads a file of ``write``.

        Raises:
            InvalidFileError: The file is missing, cut short, or not a trace of a rank; names the file and the reason.
        """
        return load(RankTrace, path, member="mosaic")


def _event(span: RankSpan) -> dict[str, Any]:
    start = round(span.start_us, 3)
    return {
        "name": f"{span.module} {span.phase}",
        "cat": span.kind,
        "ph": "X",
        "ts": start,
        "dur": round(span.end_us - start, 3),
        "args": {"step": span.step, "expected_ms": span.expected_ms},
    }


def rows_without_overlap(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Spreads complete events over the fewest rows without overlap, which the viewers need within a thread."""
    rows: list[list[dict[str, Any]]] = []
    for event in sorted(events, key=lambda event: (event["ts"], event["dur"])):
        # Half a nanosecond forgives the rounding of ts + dur.
        free = (row for row in rows if row[-1]["ts"] + row[-1]["dur"] <= event["ts"] + 5e-4)
        row = next(free, None)
        if row is None:
            rows.append(row := [])
        row.append(event)
    return rows


def metadata(kind: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    """Returns a metadata event, which names or orders a process or a thread."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args}
