"""Trains models of transformers, and odd nets and loops, in the plain way and colocated, and compares bit for bit.

``python -m bench.sweep [--pipeline | --backend cuda|cuda-graphs] [--quick] [--only NAME] [--out FILE]``

All modules that are found are placed side by side by force: on lanes of one thread each, or on a slot of a GPU each.
Each case runs in a process of its own and ends in one word: ``equal, on lanes``; ``equal within rounding`` on a GPU,
where kernels may differ; ``equal, in place``; ``refused`` before training; ``raised`` by Mosaic in training;
``different, as told`` by ``describe()``; ``different``, without a word; ``crashed`` where the plain loop runs, which
includes hanging.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch._dynamo  # once, here: every process forks from this one

from bench.bounded import PartFailedError, within
from bench.harness import study_of
from bench.record import Figure, Study
from bench.sweep.catalogue import all_cases, pipeline_cases
from bench.sweep.device import on
from bench.sweep.outcomes import CRASHED, CUDA_OUTCOMES, FAULTS, NO_PLAIN, OUTCOMES, PIPELINE_OUTCOMES
from bench.sweep.parted import judge_parted
from bench.sweep.session import Case
from bench.sweep.tables import PIPELINE_STUDY, STUDY
from bench.sweep.verdict import figure, judge
from mosaic.artifact import save
from mosaic.profiler import ForeignLoad

MAX_SECONDS = 120.0
"""Of a case; it hangs if it takes longer."""
QUICK_EVERY = 12
"""The quick form takes every twelfth case."""


def main() -> None:
    """Runs the sweep; ends with 1 if a case is different or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--pipeline", action="store_true", help="cut models into chunks, in the place of lanes")
    way.add_argument("--backend", choices=LANES, default="host", help="whose lanes run the modules (default: host)")
    parser.add_argument("--quick", action="store_true", help="a few cases of each kind")
    parser.add_argument("--only", metavar="NAME", help="the cases of this name, pattern or kind")
    parser.add_argument("--out", type=Path, help="write the result here")
    asked = parser.parse_args()
    cases = [
        case
        for case in (pipeline_cases() if asked.pipeline else all_cases())
        if asked.only is None or fnmatchcase(case.name, asked.only) or case.kind == asked.only
    ]
    trial = PIPELINE if asked.pipeline else LANES[asked.backend]
    made = sweep(cases[::QUICK_EVERY] if asked.quick else cases, trial, path=asked.out)
    sys.exit(any(one.labels["outcome"] in FAULTS for one in made.figures))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    study: str
    judge: Callable[[Case], Iterator[Figure]]
    outcomes: tuple[str, ...]
    says: str
    """Of a figure, beside its outcome."""
    device: str = "cpu"


HOST = Trial(
    study=STUDY,
    judge=judge,
    outcomes=OUTCOMES,
    says="{value:.0f} calls on lanes, overlapped: {overlapped}, {seconds} s",
)
CUDA = replace(HOST, study=f"{STUDY}_cuda", outcomes=CUDA_OUTCOMES, device="cuda")
LANES = {
    "host": HOST,
    "cuda": CUDA,
    "cuda-graphs": replace(CUDA, study=f"{STUDY}_cuda_graphs", judge=partial(judge, graphs=True)),
}
PIPELINE = Trial(
    study=PIPELINE_STUDY, judge=judge_parted, outcomes=PIPELINE_OUTCOMES, says="{modules}; {precision}, {seconds} s"
)


def sweep(cases: Iterable[Case], trial: Trial = HOST, *, path: Path | None) -> Study:
    """Runs cases, prints a line for each, and writes the result file."""
    load = ForeignLoad()
    figures = []
    for case in cases:
        with on(torch.device(trial.device)):
            figures.append(run_alone(case, trial.judge))
        print(_line(figures[-1], trial), flush=True)
    made = study_of(trial.study, figures, load)
    made = replace(made, versions={name: version(name) for name in ("transformers", "peft", "numpy")})
    print(_summary(figures, trial))
    if path is not None:
        save(made, path)
    return made


def run_alone(case: Case, judge: Callable[[Case], Iterator[Figure]] = judge, *, seconds: float = MAX_SECONDS) -> Figure:
    """Runs a case in a process of its own."""
    last = None
    try:
        for made in within(lambda: _quietly(case, judge), seconds):
            last = made
    except PartFailedError as error:
        return figure(case, NO_PLAIN if last is None else CRASHED, reason=str(error))
    assert last is not None
    return last


def _quietly(case: Case, judge: Callable[[Case], Iterator[Figure]]) -> Iterator[Figure]:
    """Judges a case at one thread, without the warnings: what they say is in its record."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    yield from judge(case)


def _line(made: Figure, trial: Trial) -> str:
    labels = made.labels
    says = trial.says.format(value=made.value, **labels)
    return f"{labels['outcome']:15}  {made.part}: {labels['case']} ({says}){': ' if made.reason else ''}{made.reason}"


def _summary(figures: Sequence[Figure], trial: Trial) -> str:
    counted = Counter(one.labels["outcome"] for one in figures)
    return ", ".join(f"{counted[outcome]} {outcome}" for outcome in (*trial.outcomes, NO_PLAIN) if counted[outcome])


if __name__ == "__main__":
    main()
