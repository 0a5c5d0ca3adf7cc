"""Trains models of transformers, and odd nets and loops, in the plain way and colocated, and compares bit for bit.

``python -m bench.sweep [--quick] [--only NAME] [--out FILE]``

All modules that are found are placed side by side on lanes of one thread each, by force. Each case runs in a process
of its own and ends in one word: ``equal, on lanes``; ``equal, in place``; ``refused`` before training; ``raised`` by
Mosaic in training; ``different, as told`` by ``describe()``; ``different``, without a word; ``crashed`` where the plain
loop runs, which includes hanging.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

import torch
import torch._dynamo  # once, here: every process forks from this one

from bench.bounded import PartFailedError, within
from bench.harness import published, study_of
from bench.record import Figure, Study
from bench.sweep.catalogue import all_cases
from bench.sweep.outcomes import CRASHED, FAULTS, NO_PLAIN, OUTCOMES
from bench.sweep.tables import STUDY
from bench.sweep.verdict import Case, figure, judge
from mosaic.artifact import save
from mosaic.profiler import ForeignLoad

MAX_SECONDS = 120.0
"""Of a case; it hangs if it takes longer."""
QUICK_EVERY = 12
"""The quick form takes every twelfth case."""


def main() -> None:
    """Runs the sweep; ends with 1 if a case is different or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases of each kind")
    parser.add_argument("--only", metavar="NAME", help="the cases of this name, pattern or kind")
    parser.add_argument("--out", type=Path, help="write the result here")
    given = parser.parse_args()
    cases = [
        case
        for case in all_cases()
        if given.only is None or fnmatchcase(case.name, given.only) or case.kind == given.only
    ]
    made = sweep(cases[::QUICK_EVERY] if given.quick else cases, path=given.out)
    sys.exit(any(one.labels["outcome"] in FAULTS for one in made.figures))


def sweep(cases: Iterable[Case], *, path: Path | None) -> Study:
    """Runs cases, prints a line for each, and writes the result file."""
    load = ForeignLoad()
    figures = []
    for case in cases:
        figures.append(run_alone(case))
        print(_line(figures[-1]), flush=True)
    made = study_of(STUDY, figures, load)
    made = replace(made, versions={name: version(name) for name in ("transformers", "peft", "numpy")})
    made = published(made, (path,))
    print(_summary(figures))
    if path is not None:
        save(made, path)
    return made


def run_alone(case: Case, seconds: float = MAX_SECONDS) -> Figure:
    """Runs a case in a process of its own."""
    last = None
    try:
        for made in within(lambda: _quietly(case), seconds):
            last = made
    except PartFailedError as error:
        return figure(case, NO_PLAIN if last is None else CRASHED, reason=str(error))
    assert last is not None
    return last


def _quietly(case: Case) -> Iterator[Figure]:
    """Judges a case at one thread, without the warnings: what they say is in its record."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    yield from judge(case)


def _line(made: Figure) -> str:
    labels = made.labels
    ran = f"{made.value:.0f} calls on lanes, overlapped: {labels['overlapped']}, {labels['seconds']} s"
    return f"{labels['outcome']:15}  {made.part}: {labels['case']} ({ran}){': ' if made.reason else ''}{made.reason}"


def _summary(figures: Sequence[Figure]) -> str:
    counted = Counter(one.labels["outcome"] for one in figures)
    return ", ".join(f"{counted[outcome]} {outcome}" for outcome in (*OUTCOMES, NO_PLAIN) if counted[outcome])


if __name__ == "__main__":
    main()
