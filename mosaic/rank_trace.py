"""The computing and waiting of one of several ranks, as a file: a Chrome trace with what a comparison of ranks needs.

The file opens in ui.perfetto.dev like any trace ("Trace Event Format", Google, 2016); its ``mosaic`` member says which
rank of which run it is of, and how far its clock is from rank 0's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mosaic.artifact import write_text
from mosaic.errors import InvalidFileError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpan:
    """One piece of work, or one wait for other ranks."""

    kind: Literal["compute", "wait"]
    """What it is."""
    module: str
    """Module that it belongs to."""
    phase: str
    """``forward``, ``backward``, ``reduce`` or ``agreement``."""
    step: int
    """Index of the training step, from 0."""
    start_us: float
    """Microseconds on rank 0's clock."""
    end_us: float
    """Microseconds on rank 0's clock."""
    expected_ms: float = 0.0
    """How long the plan has it take; 0: no plan says. In a pipeline each rank has layers of its own to compute."""

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return (self.end_us - self.start_us) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank did in some steps."""

    run: str
    """Same text, same start of the ranks."""
    rank: int
    """Which one."""
    num_ranks: int
    """How many there are."""
    host: str
    """Its machine."""
    clock_offset_us: float
    """What was added to its clock to have rank 0's."""
    clock_error_us: float
    """How far that may be off: half the time of the fastest message there and back."""
    spans: tuple[RankSpan, ...]
    """What it did, by start."""

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            MosaicError: The folder cannot be written or the disk is full.
        """
        about = {"schema_version": SCHEMA_VERSION, **{name: getattr(self, name) for name in _ABOUT}}
        events = [metadata("process_name", self.rank, 0, name=f"rank {self.rank} ({self.host})")]
        for thread, (kind, name) in enumerate((("compute", "computes"), ("wait", "waits")), start=1):
            own = [_event(span) for span in self.spans if span.kind == kind]
            for index, row in enumerate(rows_without_overlap(own)):
                place = {"pid": self.rank, "tid": thread + 10 * index}
                events.append(metadata("thread_name", self.rank, place["tid"], name=name))
                events += [{**event, **place} for event in row]
        write_text(json.dumps({"displayTimeUnit": "ms", "mosaic": about, "traceEvents": events}) + "\n", path)

    @staticmethod
    def read(path: Path) -> RankTrace:
        """Reads a file that ``write`` made.

        Raises:
            InvalidFileError: It is missing, cut short, or no trace of a rank; says which file, and why.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InvalidFileError(f"cannot read {path}: {reason}") from error
        except json.JSONDecodeError as error:
            raise InvalidFileError(
                f"{path}, line {error.lineno}: not valid JSON ({error.msg}); the file may have been cut short"
            ) from error
        about = raw.get("mosaic") if isinstance(raw, dict) else None
        if not isinstance(about, dict):
            raise InvalidFileError(
                f"{path} is no trace of a rank; handle.write_trace(folder), on every rank, writes them"
            )
        if about.get("schema_version") != SCHEMA_VERSION:
            raise InvalidFileError(
                f"{path}: schema_version={about.get('schema_version')!r} is not {SCHEMA_VERSION}, which this Mosaic "
                "reads; write the trace again"
            )
        try:
            spans = [_span(event) for event in raw["traceEvents"] if event["ph"] == "X"]
            known = {name: kind(about[name]) for name, kind in _ABOUT.items()}
            return RankTrace(**known, spans=tuple(sorted(spans, key=lambda span: span.start_us)))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidFileError(f"{path}: {type(error).__name__}: {error}; write the trace again") from error


_ABOUT: dict[str, Any] = {
    **{"run": str, "rank": int, "num_ranks": int},
    **{"host": str, "clock_offset_us": float, "clock_error_us": float},
}


def _span(event: dict[str, Any]) -> RankSpan:
    start, length = float(event["ts"]), float(event["dur"])
    if not 0 <= length < float("inf"):
        raise ValueError(f"dur={length} is no length of time")
    return RankSpan(**event["args"], start_us=start, end_us=start + length)


def _event(span: RankSpan) -> dict[str, Any]:
    args = asdict(span)
    start, end = args.pop("start_us"), args.pop("end_us")
    times = {"ts": round(start, 3), "dur": round(end - start, 3)}
    return {"name": f"{span.module} {span.phase}", "cat": span.kind, "ph": "X", **times, "args": args}


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
