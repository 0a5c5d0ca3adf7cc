"""The content of a result file: figures with source and provenance. Loads neither torch nor CUDA."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mosaic.artifact import StrictFile
from mosaic.device import Device

Source = Literal["measured", "simulated", "predicted"]
Status = Literal["done", "cut short", "failed", "timed out", "killed", "left out"]

MAX_SAMPLES = 40
"""Maximum number of raw samples of a figure in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(StrictFile):
    """One number of a study."""

    name: str
    source: str
    """``measured``, ``simulated`` or ``predicted``."""
    value: float | None
    """The number; None if unavailable."""
    low: float | None = None
    high: float | None = None
    """Ends of its 95 % interval."""
    samples: tuple[float, ...] = ()
    reason: str = ""
    part: str = ""
    """Name of the measurement that it belongs to; empty in studies of one part."""
    labels: dict[str, str] = field(default_factory=dict)
    """Its subject, such as ``work`` and ``quota``."""
    dry_run: bool = False
    """True if it comes from a rehearsal at minimal sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(StrictFile):
    """The outcome of a part of a study: a build, tests, or a measurement."""

    name: str
    asks: str
    status: Status
    """Its end: ``cut short`` by its own time limit, ``timed out`` and ``killed`` from outside."""
    seconds: float = 0.0
    reason: str = ""
    """Reason for a failure."""
    left_out: tuple[str, ...] = ()
    """Pieces beyond its time limit."""
    notes: tuple[str, ...] = ()
    """Notes about its figures."""
    verdict: str = ""
    """The conclusion, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study(StrictFile):
    """All figures of one run of one study."""

    schema_version: int = 1
    study: str
    """Name of the file under ``bench``."""
    command: str
    created: str
    commit: str
    python_version: str
    torch_version: str
    machine: Device | None
    """Its device; None if unknown."""
    foreign_cpu_share: float | None
    """Share of the CPU that other processes took meanwhile; None where unknown."""
    figures: tuple[Figure, ...]
    dry_run: bool = False
    """True if everything ran at minimal sizes, so the numbers are meaningless."""
    driver_version: str = ""
    """Version of the CUDA driver and of the CUDA that it serves; empty on the host."""
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that affect measurements."""
    parts: tuple[Part, ...] = ()
    """Parts in order of execution."""

    def of(self, part: str, name: str | None = None) -> tuple[Figure, ...]:
        """Returns the figures of a part, or of all parts below it (``models`` holds ``models/clip/8``)."""
        return tuple(
            figure
            for figure in self.figures
            if (figure.part == part or figure.part.startswith(f"{part}/")) and name in (None, figure.name)
        )


def summary_figure(
    name: str,
    samples: Sequence[float],
    *,
    statistic: Callable[[Sequence[float]], float] = statistics.median,
    source: Source = "measured",
    labels: dict[str, str] | None = None,
    reason: str = "nothing was measured",
) -> Figure:
    """Returns a statistic of samples with its bootstrapped 95 % interval; without samples, no number."""
    if not samples:
        return missing_figure(name, reason, labels, source=source)
    draw = random.Random(0)
    values = sorted(statistic(draw.choices(samples, k=len(samples))) for _ in range(500))
    return Figure(
        name=name,
        source=source,
        value=statistic(samples),
        low=values[12],
        high=values[-13],
        samples=tuple(float(f"{sample:.6g}") for sample in samples[:MAX_SAMPLES]),
        labels=labels or {},
    )


def median_figure(name: str, samples: Sequence[float], *, labels: dict[str, str] | None = None) -> Figure:
    return summary_figure(name, samples, labels=labels)


def missing_figure(
    name: str, reason: object, labels: dict[str, str] | None = None, *, source: Source = "measured"
) -> Figure:
    """Returns a figure without a number, with a one-line reason."""
    return Figure(name=name, source=source, value=None, reason=one_line(reason), labels=labels or {})


def one_line(text: object, most: int = 400) -> str:
    """Returns a text or an error as one line, shortened in the middle."""
    words = " ".join(str(text).split()).partition(" Search for `cuda")[0]  # torch's advice is the same after each error
    if isinstance(text, BaseException):
        words = f"{type(text).__name__}: {words}"
    return words if len(words) <= most else f"{words[: most // 2]} ... {words[-most // 2 :]}"
