"""The harness of all studies: parts with time limits, a command line, and a result file with its provenance."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.processes import Make, PartFailedError, within
from bench.record import Figure, Study, missing_figure
from mosaic.artifact import provenance, save
from mosaic.backends.host.backend import HostBackend
from mosaic.profiler import ForeignLoad


def study_of(study: str, figures: Sequence[Figure], load: ForeignLoad) -> Study:
    """Returns figures of this host with their provenance."""
    return Study(
        study=study,
        **provenance(),
        torch_version=torch.__version__,
        machine=HostBackend().device,
        foreign_cpu_share=load.share,
        figures=tuple(figures),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPart:
    name: str
    make: Callable[[float], Iterator[Figure]]
    """Yields figures, within the given seconds."""
    seconds: float

    @classmethod
    def alone(cls, name: str, seconds: float, make: Make) -> StudyPart:
        """Returns a part that runs in its own process."""
        return cls(name=name, make=lambda left: within(make, left), seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedStudy:
    """A study of parts, with a quick form."""

    name: str
    quick: Callable[[], Sequence[StudyPart]]
    """Returns the parts of the quick form, by importance."""
    quick_seconds: float
    """Time limit of a quick study."""
    full: Callable[[], Sequence[StudyPart]]
    full_seconds: float = math.inf

    def main(self, description: str | None, quick_help: str) -> Study:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--quick", action="store_true", help=quick_help)
        parser.add_argument("--json", type=Path, help="write the result here")
        options = parser.parse_args()
        parts = self.quick() if options.quick else self.full()
        longest = min(sum(part.seconds for part in parts), self.quick_seconds if options.quick else self.full_seconds)
        print(f"{len(parts)} parts, at most {longest:.0f} s", flush=True)
        return self.run(parts, path=options.json, seconds=longest)

    def run(self, parts: Iterable[StudyPart], *, path: Path | None, seconds: float = math.inf) -> Study:
        """Measures, reports, and writes the file after each part.

        A part that fails or has no time left becomes a figure with the reason.
        """
        load = ForeignLoad()
        ends = time.perf_counter() + seconds
        figures: list[Figure] = []
        for part in parts:
            began = time.perf_counter()
            try:
                for figure in part.make(min(part.seconds, ends - began)):  # one by one, to keep those before an error
                    figures.append(figure)
            except PartFailedError as error:
                figures.append(missing_figure(f"{part.name}: what is missing of it", error))
            print(f"[{part.name}: {time.perf_counter() - began:.1f} s]", flush=True)
            if path is not None:
                save(study_of(self.name, figures, load), path)
        study = study_of(self.name, figures, load)
        for figure in study.figures:
            shown = "not measured: " + figure.reason if figure.value is None else f"{figure.value:.3f}"
            interval = f"  [{figure.low:.3f}, {figure.high:.3f}]" if figure.low is not None else ""
            print(f"{figure.name:58} {shown}{interval}  ({figure.source})")
        if path is not None:
            save(study, path)
        return study
