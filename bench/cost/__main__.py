"""How well does the cost model predict: held-out plans, surfaces, counts; and what do plans made with it cost?

``python -m bench.cost [--quick] [--json FILE]``

Everything that judges is measured after, and apart from, all that is fitted. What two cores cannot show is simulated
as well, in figures of their own; on a GPU ``bench.gpu`` measures it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from bench.cost.figures import GOALS, verdict
from bench.cost.ground import FULL, QUICK, Scale
from bench.cost.study import CostStudy
from bench.gpu.bench import Bench
from bench.harness import finish, published
from bench.record import Study
from mosaic.artifact import save
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget
from mosaic.profiler import ForeignLoad
from mosaic.provenance import Provenance

QUICK_S = 40.0
"""Time after which ``--quick`` starts nothing new."""


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="few modules and repetitions; within a minute on two cores"
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    scale, seconds = (QUICK, QUICK_S) if given.quick else (FULL, float("inf"))
    study(scale, seconds=seconds, path=given.json)


def study(scale: Scale, *, seconds: float, path: Path | None) -> Study:
    """Measures and reports."""
    load, began = ForeignLoad(), Provenance.here()  # others may commit while it runs
    run = CostStudy(Bench(backend=HostBackend(), budget=Budget(seconds), dry_run=False), scale)
    figures = tuple(run.run())
    made = published(finish("bench_cost", figures, load, None), (path,))
    made = replace(made, commit=began.commit, parts=tuple(run.parts))
    verdicts = [verdict(figure) for figure in figures if figure.name in GOALS]
    print("goals: " + ", ".join(f"{verdicts.count(word)} {word}" for word in ("met", "not met", "not measured")))
    if path is not None:
        save(made, path)
    return made


if __name__ == "__main__":
    main()
