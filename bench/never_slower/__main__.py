"""Whether a loop is ever slower with the default line: eight models, what ran after the trial, and what it cost.

``python -m bench.never_slower [--quick] [--json FILE]``

Each model has a process of its own, in which blocks of its steps and of the plain loop's are taken in turn. A model
runs slower, or faster, where the whole 95 % interval of the ratio says so. On a machine whose cores others use the
default line steps aside; each figure has the share of the CPU that they took.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.harness import published
from bench.never_slower.models import MODELS, RECURRENT
from bench.never_slower.turns import RATIO, measure
from bench.record import Figure, Study
from bench.study_parts import PartedStudy, StudyPart
from mosaic.artifact import save

PART_S = 42.0
"""A model is ended after this; its last round begins some seconds before."""
END_S = 8.0


def parts(names: Sequence[str], *, rounds: int) -> tuple[StudyPart, ...]:
    """Returns a part for each model."""
    return tuple(
        StudyPart.alone(name, PART_S, partial(measure, name, MODELS[name], rounds=rounds, seconds=PART_S - END_S))
        for name in names
    )


def with_counts(figures: Sequence[Figure]) -> list[Figure]:
    """Adds how many models run slower, how many faster, and how many can be told from the plain loop in neither way."""
    ratios = [figure for figure in figures if figure.name.endswith(RATIO) and figure.value is not None]
    slower = sum(figure.high is not None and figure.high < 1 for figure in ratios)
    faster = sum(figure.low is not None and figure.low > 1 for figure in ratios)
    counts = {"slower": slower, "faster": faster, "neither": len(ratios) - slower - faster}
    of = f"of {len(ratios)} models, by their intervals"
    made = [Figure(name=f"{how}: {of}", source="measured", value=float(count)) for how, count in counts.items()]
    return [*made, *figures]


STUDY = PartedStudy(
    name="bench_never_slower",
    quick=lambda: parts(("clip-tiny", RECURRENT), rounds=4),
    quick_seconds=2 * PART_S,
    full=lambda: parts((RECURRENT, *(name for name in MODELS if name != RECURRENT)), rounds=60),
    full_seconds=len(MODELS) * PART_S,
    complete=with_counts,
)


def study(path: Path | None, *, quick: bool) -> Study:
    """Measures and reports."""
    chosen, seconds = (STUDY.quick(), STUDY.quick_seconds) if quick else (STUDY.full(), STUDY.full_seconds)
    made = published(STUDY.run(chosen, path=path, seconds=seconds), (path,))
    for figure in made.figures:
        if figure.name.endswith(RATIO):
            print(f"{figure.labels['model']}: runs {figure.labels['runs']}; {figure.labels['decided']}")
    if path is not None:
        save(made, path)
    return made


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two models, few rounds; within a minute on two cores")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    study(given.json, quick=given.quick)


if __name__ == "__main__":
    main()
