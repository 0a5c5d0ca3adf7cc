"""How good, how sure and how fast are the solvers? On generated instances; see mosaic/solver/README.md.

``python -m bench.bench_solver [--quick] [--json FILE] [--pictures DIR]``

Costs and gains are simulated, search times are measured on this machine. A figure that could not be had has no number
and a reason. Every part runs in a process of its own with a time after which it is ended, and the file is written anew
after each part, so that an interrupt loses only the part that runs. ``--quick``: within a minute on two quiet cores.
Without it: about 20 minutes, and never more than the parts' times together, which is printed first.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bounded import Make, PartFailedError, within
from bench.harness import finish, study_of
from bench.record import Figure, Study, missing_figure
from bench.solver_gains import gains
from bench.solver_goals import table, with_missing
from bench.solver_models import gains_of_models
from bench.solver_paper import figure_13, figure_14a, figure_14b
from bench.solver_parts import feedback, fine_slots, held_memory, replanning, worth_of_parts
from bench.solver_pictures import draw
from bench.solver_proofs import sixty_four_modules, ten_modules, twenty_modules
from mosaic.artifact import save
from mosaic.profiler import ForeignLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPart:
    """One part of the study."""

    name: str
    """What it is about."""
    make: Make
    """Makes its figures."""
    seconds: float
    """When it is ended."""


def _part(name: str, seconds: float, make: Make) -> StudyPart:
    return StudyPart(name=name, make=make, seconds=seconds)


QUICK_SECONDS = 57.0
"""After this a quick study ends whatever runs and starts nothing: the rest of its minute is for loading and writing."""
QUICK: tuple[StudyPart, ...] = (
    _part("10 modules", 10, lambda: ten_modules(seeds=2, seconds=10, disturbed=False)),
    _part("10 modules with interference", 10, lambda: ten_modules(seeds=1, seconds=0.5, disturbed=True)),
    _part("20 modules", 30, lambda: twenty_modules(seeds=1)),
    _part("Fig. 13", 10, lambda: figure_13(sizes=(3, 4, 5), seconds=5)),
    _part("Fig. 14a", 10, lambda: figure_14a(seeds=2, seconds=2)),
    _part("Fig. 14b", 10, lambda: figure_14b(num_modules=4, seconds=2)),
    _part("worth of parts", 10, lambda: worth_of_parts(seeds=1, num_modules=6, iterations=200)),
    _part("slots of 2 SMs", 10, lambda: fine_slots(seeds=1, num_modules=5, seconds=1)),
    _part("feedback", 10, lambda: feedback(seeds=1, num_modules=5, sigma=0.1)),
    _part("memory across stages", 10, lambda: held_memory(seeds=1, num_modules=6, seconds=1)),
    _part("re-planning", 10, lambda: replanning(sizes=(14,), seeds=1, seconds=1)),
    _part("64 modules", 15, lambda: sixty_four_modules(seeds=1, limits=(2.0,))),
    _part("gains", 25, lambda: gains(seeds=2, num_modules=5, seconds=1)),
    _part("the six models", 30, lambda: gains_of_models(size="tiny", batch=8, num_devices=(8,), seconds=1)),
)
FULL: tuple[StudyPart, ...] = (
    _part("10 modules", 120, lambda: ten_modules(seeds=20, seconds=10, disturbed=False)),
    _part("10 modules with interference", 120, lambda: ten_modules(seeds=4, seconds=2, disturbed=True)),
    _part("20 modules", 150, lambda: twenty_modules(seeds=5)),
    _part("Fig. 13", 240, lambda: figure_13(sizes=(3, 4, 5, 6, 8, 10, 12), seconds=30)),
    _part("Fig. 14a", 60, lambda: figure_14a(seeds=10, seconds=10)),
    _part("Fig. 14b", 150, lambda: figure_14b(num_modules=8, seconds=10)),
    _part("worth of parts", 150, lambda: worth_of_parts(seeds=5, num_modules=9, iterations=1500)),
    _part("slots of 2 SMs", 120, lambda: fine_slots(seeds=3, num_modules=8, seconds=5)),
    _part("feedback", 60, lambda: feedback(seeds=5, num_modules=9, sigma=0.1)),
    _part("memory across stages", 120, lambda: held_memory(seeds=3, num_modules=10, seconds=5)),
    _part("re-planning", 150, lambda: replanning(sizes=(16, 20), seeds=1, seconds=5)),
    _part("64 modules", 300, lambda: sixty_four_modules(seeds=2, limits=(3.0, 10.0, 60.0))),
    _part("gains", 240, lambda: gains(seeds=8, num_modules=10, seconds=5)),
    _part("the six models", 300, lambda: gains_of_models(size="paper", batch=32, num_devices=(2, 4, 8), seconds=5)),
)


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and small instances; within a minute on two cores")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--pictures", type=Path, help="draw the figures into this folder")
    given = parser.parse_args()
    parts = QUICK if given.quick else FULL
    usual = "within one minute" if given.quick else "about 20 minutes"
    longest = min(sum(part.seconds for part in parts), QUICK_SECONDS if given.quick else math.inf)
    print(f"{len(parts)} parts: {usual} on two quiet cores; ended after {longest:.0f} s at the latest", flush=True)
    made = study(parts, path=given.json, seconds=longest)
    if given.pictures is not None:
        draw(made, given.pictures)


def study(parts: Sequence[StudyPart], *, path: Path | None, seconds: float = math.inf) -> Study:
    """Measures and reports; a part that fails becomes a figure with the reason and ends nothing else.

    Args:
        parts: What to measure, what matters most first.
        path: The result file; None writes none.
        seconds: For all parts together; those for which there is no time left are figures with that reason.
    """
    load = ForeignLoad()
    ends = time.perf_counter() + seconds
    figures: list[Figure] = []
    for part in parts:
        began = time.perf_counter()
        try:
            for figure in within(part.make, min(part.seconds, ends - began)):  # one by one: those before an error stay
                figures.append(figure)
        except PartFailedError as error:
            figures.append(missing_figure(f"{part.name}: what is missing of it", error))
        print(f"[{part.name}: {time.perf_counter() - began:.1f} s]", flush=True)
        if path is not None:
            save(study_of("bench_solver", figures, load), path)
    made = finish("bench_solver", with_missing(figures), load, path)
    print("", "goals:", *table(made.figures), sep="\n")
    return made


if __name__ == "__main__":
    main()
