"""How well does the cost model predict: groups side by side, surfaces, counted operators; and what do its plans cost?

``python -m bench.cost [--quick] [--only SOURCE] [--json FILE]``

Truth comes from outside of the model: from an event simulator of an eighth of a GPU that knows no form of interference
and no prior, and from modules that run on this machine. What is fitted, what chooses and what judges are three sets.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from bench.cost.ground import FULL, QUICK, Scale
from bench.cost.study import CostStudy
from bench.gpu.bench import Bench
from bench.harness import finish, published
from bench.record import Source, Study
from mosaic.artifact import save
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget
from mosaic.profiler import ForeignLoad
from mosaic.provenance import Provenance

QUICK_S = 240.0
"""Time after which ``--quick`` starts nothing new."""


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few modules and groups; minutes on two cores")
    parser.add_argument("--only", choices=("simulated", "measured"), help="leave out the other source")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    scale, seconds = (QUICK, QUICK_S) if given.quick else (FULL, float("inf"))
    study(scale, seconds=seconds, path=given.json, only=given.only)


def study(scale: Scale, *, seconds: float, path: Path | None, only: Source | None = None) -> Study:
    """Measures and reports."""
    load, began = ForeignLoad(), Provenance.here()  # others may commit while it runs
    run = CostStudy(Bench(backend=HostBackend(), budget=Budget(seconds), dry_run=False), scale)
    figures = tuple(run.run(only))
    made = published(finish("bench_cost", figures, load, None), (path,))
    made = replace(made, commit=began.commit, parts=tuple(run.parts))
    if path is not None:
        save(made, path)
    return made


if __name__ == "__main__":
    main()
