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
from bench.never_slower.turns import AGAIN, RATIO, measure
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
    """Adds how many models run slower or faster by their intervals, and in how many two plain loops seem to differ."""
    slower, faster, count = _told_apart(figures, RATIO)
    below, above, pairs = _told_apart(figures, AGAIN)
    counts = {
        f"slower: of {count} models, by their intervals": slower,
        f"faster: of {count} models, by their intervals": faster,
        f"neither: of {count} models, by their intervals": count - slower - faster,
        f"of {pairs} models, those whose two plain loops differ by their intervals": below + above,
    }
    return [*(Figure(name=name, source="measured", value=float(value)) for name, value in counts.items()), *figures]


def _told_apart(figures: Sequence[Figure], name: str) -> tuple[int, int, int]:
    """Returns how many ratios of a name are below 1 and above 1 by their whole interval, and how many there are."""
    ratios = [figure for figure in figures if figure.name.endswith(name) and figure.value is not None]
    below = sum(figure.high is not None and figure.high < 1 for figure in ratios)
    above = sum(figure.low is not None and figure.low > 1 for figure in ratios)
    return below, above, len(ratios)


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
