"""Mosaic's own cost: of calls, and of steps.

``python -m bench.colocate [--quick] [--json FILE]``

Calls of empty modules; steps of the zoo's models under the sequential plan, which can gain nothing, against the plain
loop. What the trial in the first steps makes of a loop is ``bench.never_slower``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.colocate.calls import measure_calls
from bench.colocate.models import goals, measure_models
from bench.harness import finish, published
from bench.record import Study
from mosaic.artifact import save
from mosaic.microbench import Budget
from mosaic.profiler import ForeignLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    calls: int
    """Placed calls under the sequential plan; a tenth as many on lanes."""
    rounds: int
    """Rounds in which plain and colocated steps take turns."""
    seconds: float
    """Time after which no other model is begun."""


QUICK = Scale(calls=10_000, rounds=6, seconds=40.0)
FULL = Scale(calls=10_000, rounds=30, seconds=float("inf"))


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds; within a minute on two cores")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    study(QUICK if given.quick else FULL, path=given.json)


def study(scale: Scale, *, path: Path | None) -> Study:
    """Measures and reports."""
    load, budget = ForeignLoad(), Budget(scale.seconds)
    figures = measure_calls(scale.calls)
    figures += measure_models(scale.rounds, budget)
    made = published(finish("bench_colocate", figures, load, None), (path,))
    print("\n".join(["", *goals(figures)]))
    if path is not None:
        save(made, path)
    return made


if __name__ == "__main__":
    main()
