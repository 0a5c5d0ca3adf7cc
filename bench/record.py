"""The contents of a result file: figures with their source, and where they come from. Loads neither torch nor CUDA."""

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
"""Raw samples of a figure that a file keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(StrictFile):
    """One number of a study."""

    name: str
    source: str
    """``measured``, ``simulated`` or ``predicted``."""
    value: float | None
    """The number; None where it could not be had."""
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
    """True if it comes from a rehearsal at the smallest sizes, and means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(StrictFile):
    """The outcome of one step of a study: of a build, of tests, or of one measurement."""

    name: str
    asks: str
    status: Status
    """Its end: ``cut short`` by its own bound on time, ``timed out`` and ``killed`` from outside."""
    seconds: float = 0.0
    reason: str = ""
    """Why it did not end well."""
    left_out: tuple[str, ...] = ()
    """Pieces that it had no time for."""
    notes: tuple[str, ...] = ()
    """Remarks on its figures."""
    verdict: str = ""
    """The conclusion in plain words; empty where the figures speak for themselves."""


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
    """Its device; None where that could not be read."""
    foreign_cpu_share: float | None
    """Share of the CPU that other processes took meanwhile; None where unknown."""
    figures: tuple[Figure, ...]
    dry_run: bool = False
    """True if everything ran at the smallest sizes: then no number means anything."""
    driver_version: str = ""
    """Version of the CUDA driver and of the CUDA that it serves; empty on the host."""
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that can change what was measured."""
    parts: tuple[Part, ...] = ()
    """Steps and measurements in the order in which they ran."""

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
    """Returns a statistic of samples with its bootstrapped 95 % interval; without a number where there are none."""
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
    """Returns a figure without a number, with the reason in one line."""
    return Figure(name=name, source=source, value=None, reason=one_line(reason), labels=labels or {})


def one_line(text: object, most: int = 400) -> str:
    """Returns text or an error in one line, shortened in the middle."""
    words = " ".join(str(text).split()).partition(" Search for `cuda")[0]  # torch's advice is the same after each error
    if isinstance(text, BaseException):
        words = f"{type(text).__name__}: {words}"
    return words if len(words) <= most else f"{words[: most // 2]} ... {words[-most // 2 :]}"
