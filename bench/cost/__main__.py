"""The study of the cost model's errors: groups side by side, and counted operators.

``python -m bench.cost [--quick] [--json FILE]``

Modules run on this machine. Fitting and evaluation use disjoint sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from bench.cost.study import FULL, QUICK, CostStudy, Scale
from bench.gpu.bench import Bench
from bench.harness import PartedStudy, StudyPart
from bench.record import Figure
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget


def parts(scale: Scale, seconds: float) -> tuple[StudyPart, ...]:
    """Returns the one part of a study, with a time limit."""
    return (StudyPart(name="cost", make=partial(_figures, scale), seconds=seconds),)


def _figures(scale: Scale, seconds: float) -> Iterator[Figure]:
    yield from CostStudy(Bench(backend=HostBackend(), budget=Budget(seconds), dry_run=False), scale).run()


STUDY = PartedStudy(
    name="bench_cost",
    quick=lambda: parts(QUICK, 240.0),
    quick_seconds=240.0,
    full=lambda: parts(FULL, math.inf),
)

if __name__ == "__main__":
    STUDY.main(__doc__, "few modules and groups; minutes on two cores")
