"""How well does the cost model predict: groups side by side, surfaces, and counted operators?

``python -m bench.cost [--quick] [--json FILE]``

Modules run on this machine. What is fitted and what judges are two sets.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.cost.study import FULL, QUICK, CostStudy, Scale
from bench.gpu.bench import Bench
from bench.harness import finish
from bench.record import Study
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget
from mosaic.profiler import ForeignLoad

QUICK_S = 240.0
"""Time after which ``--quick`` starts nothing new."""


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few modules and groups; minutes on two cores")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    scale, seconds = (QUICK, QUICK_S) if arguments.quick else (FULL, float("inf"))
    study(scale, seconds=seconds, path=arguments.json)


def study(scale: Scale, *, seconds: float, path: Path | None) -> Study:
    """Measures and reports."""
    load = ForeignLoad()
    bench = Bench(backend=HostBackend(), budget=Budget(seconds), dry_run=False)
    return finish("bench_cost", tuple(CostStudy(bench, scale).run()), load, path)


if __name__ == "__main__":
    main()
