"""What every study uses: rounds in turn, intervals, and a result file that says where it comes from."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from mosaic.artifact import save
from mosaic.backends.host import HostBackend
from mosaic.device import Device
from mosaic.profiler import ForeignLoad
from mosaic.provenance import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a study."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str
    """What it is, with its unit."""
    source: str
    """``measured``, ``simulated`` or ``predicted``."""
    value: float | None
    """The number; None where it could not be had."""
    low: float | None = None
    """Lower end of its 95 % interval."""
    high: float | None = None
    """Upper end of its 95 % interval."""
    samples: tuple[float, ...] = ()
    """Raw samples."""
    reason: str = ""
    """Why there is no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All figures of one run of one study."""

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    schema_version: int = 1
    """Version of this file's layout."""
    study: str
    """Name of the file under ``bench``."""
    command: str
    """The command line."""
    created: str
    """Date and time, ISO 8601, UTC."""
    commit: str
    """Commit of the code."""
    python_version: str
    """Version of Python."""
    torch_version: str
    """Version of torch."""
    machine: Device
    """Where it ran."""
    foreign_cpu_share: float | None
    """Share of the CPU that other processes took meanwhile; None where unknown."""
    figures: tuple[Figure, ...]
    """The numbers."""


def median_figure(name: str, samples: Sequence[float], *, seed: int = 0) -> Figure:
    """Returns the median of measured samples with a bootstrapped 95 % interval."""
    low, high = _interval(list(samples), statistics.median, seed)
    return Figure(
        name=name, source="measured", value=statistics.median(samples), low=low, high=high, samples=tuple(samples)
    )


def in_turn(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Measures two things alternately, so that a drift of the machine hits both."""
    firsts, seconds = [], []
    for _ in range(rounds):
        firsts.append(first())
        seconds.append(second())
    return firsts, seconds


def finish(study: str, figures: Sequence[Figure], load: ForeignLoad, path: Path | None) -> Study:
    """Prints the figures and writes the result file."""
    provenance = Provenance.here()
    made = Study(
        study=study,
        command=provenance.command,
        created=provenance.created,
        commit=provenance.commit,
        python_version=provenance.python_version,
        torch_version=torch.__version__,
        machine=HostBackend().device,
        foreign_cpu_share=load.share,
        figures=tuple(figures),
    )
    for figure in figures:
        shown = "not measured: " + figure.reason if figure.value is None else f"{figure.value:.3f}"
        interval = f"  [{figure.low:.3f}, {figure.high:.3f}]" if figure.low is not None else ""
        print(f"{figure.name:58} {shown}{interval}  ({figure.source})")
    if path is not None:
        save(made, path)
    return made


def _interval(samples: list[float], statistic: Callable[[list[float]], float], seed: int) -> tuple[float, float]:
    draw = random.Random(seed)
    found = sorted(statistic(draw.choices(samples, k=len(samples))) for _ in range(500))
    return found[12], found[-13]
