"""Trains models of transformers, and unusual nets and loops, plain and colocated, and compares bit for bit.

``python -m bench.sweep [--pipeline | --operators | --backend cuda|cuda-graphs] [--quick] [--only NAME] [--out FILE]``

All modules are placed side by side: on lanes of one thread each, or on a slot of a GPU each. Each case runs in its own
process and has one outcome: ``equal, on lanes``; ``equal within rounding`` on a GPU, where kernels may differ; ``equal,
in place``; ``refused`` before training; ``raised`` by Mosaic in training; ``different, as told`` by ``describe()``;
``different`` without a warning; ``crashed`` or hanging, although the plain loop runs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
import torch._dynamo  # once, because every process forks from this one

from bench.harness import study_of
from bench.processes import PartFailedError, within
from bench.record import Figure, Study
from bench.sweep import tables
from bench.sweep.catalogue import all_cases, pipeline_cases
from bench.sweep.device import on
from bench.sweep.parted import judge_parted
from bench.sweep.session import Case
from bench.sweep.verdict import figure, judge
from mosaic.artifact import save
from mosaic.profiler import ForeignLoad

MAX_SECONDS = 120.0
"""Of a case; it hangs if it takes longer."""
QUICK_EVERY = 12
"""The quick form takes every twelfth case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    study: str
    judge: Callable[[Case], Iterator[Figure]] = judge
    outcomes: tuple[str, ...]
    device: str = "cpu"


HOST = Trial(study=tables.STUDY, outcomes=tables.OUTCOMES)
CUDA = Trial(study=f"{tables.STUDY}_cuda", outcomes=tables.CUDA_OUTCOMES, device="cuda")
LANES = {
    "host": HOST,
    "cuda": CUDA,
    "cuda-graphs": replace(CUDA, study=f"{tables.STUDY}_cuda_graphs", judge=partial(judge, graphs=True)),
}
PIPELINE = Trial(study=tables.PIPELINE_STUDY, judge=judge_parted, outcomes=tables.PIPELINE_OUTCOMES)


def main() -> None:
    """Runs the sweep; exits with 1 if a case is different or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--pipeline", action="store_true", help="cut models into chunks instead of lanes")
    choice.add_argument("--operators", action="store_true", help="torch's operators on results of lanes")
    choice.add_argument("--backend", choices=LANES, default="host", help="backend of the lanes (default: host)")
    parser.add_argument("--quick", action="store_true", help="a few cases of each kind")
    parser.add_argument("--only", metavar="NAME", help="cases of this name, pattern or kind")
    parser.add_argument("--out", type=Path, help="write the result here")
    options = parser.parse_args()
    if options.operators:
        if find_spec("expecttest") is None:
            parser.error("--operators needs torch's database, which needs expecttest: pip install expecttest")
        from bench.sweep.operators import judge_operator, operator_cases  # torch's database loads for seconds

        trial = Trial(study=tables.OPERATORS_STUDY, judge=judge_operator, outcomes=tables.OUTCOMES)
        every_case = operator_cases()
    else:
        trial = PIPELINE if options.pipeline else LANES[options.backend]
        every_case = pipeline_cases() if options.pipeline else all_cases()
    cases = [
        case
        for case in every_case
        if options.only is None or fnmatchcase(case.name, options.only) or case.kind == options.only
    ]
    result = sweep(cases[::QUICK_EVERY] if options.quick else cases, trial, path=options.out)
    sys.exit(any(figure.labels["outcome"] in tables.FAULTS for figure in result.figures))


def sweep(cases: Iterable[Case], trial: Trial = HOST, *, path: Path | None) -> Study:
    """Runs cases, prints a line for each, and writes the result file."""
    load = ForeignLoad()
    figures = []
    for case in cases:
        with on(torch.device(trial.device)):
            result = run_alone(case, trial.judge)
        figures.append(result)
        details = [f"{name}: {value}" for name, value in result.labels.items() if name not in ("case", "outcome")]
        reason = f": {result.reason}" if result.reason else ""
        print(
            f"{result.labels['outcome']:15}  {result.name} {result.value:.0f} ({', '.join(details)}){reason}",
            flush=True,
        )
    study = study_of(trial.study, figures, load)
    study = replace(study, versions={name: version(name) for name in ("transformers", "peft", "numpy")})
    counts = Counter(figure.labels["outcome"] for figure in figures)
    words = dict.fromkeys((*trial.outcomes, tables.NO_PLAIN))
    print(", ".join(f"{counts[word]} {word}" for word in words if counts[word]))
    if path is not None:
        save(study, path)
    return study


def run_alone(case: Case, judge: Callable[[Case], Iterator[Figure]] = judge, *, seconds: float = MAX_SECONDS) -> Figure:
    """Runs a case in a process of its own."""
    last = None
    try:
        for figure_so_far in within(lambda: _quietly(case, judge), seconds):
            last = figure_so_far
    except PartFailedError as error:
        return figure(case, tables.NO_PLAIN if last is None else tables.CRASHED, reason=str(error))
    assert last is not None
    return last


def _quietly(case: Case, judge: Callable[[Case], Iterator[Figure]]) -> Iterator[Figure]:
    """Judges a case at one thread, without the warnings, which its record has."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    yield from judge(case)


if __name__ == "__main__":
    main()
