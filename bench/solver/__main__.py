"""The study of the solvers on random instances: plan quality, proofs, and search times.

``python -m bench.solver [--quick] [--json FILE]``

Every part runs in its own process with a time limit, and the file is written after each part.
``--quick``: within a minute on two quiet cores; without it about half an hour.
"""

from __future__ import annotations

from functools import partial

from bench.harness import PartedStudy, StudyPart
from bench.solver import study

_part = StudyPart.alone
QUICK = (
    _part("gains", 25, partial(study.gains, seeds=1, num_modules=5, seconds=1)),
    _part("10 modules", 10, partial(study.ten_modules, seeds=2, seconds=10)),
    _part("memory across stages", 10, partial(study.held_memory, seeds=1, sizes=(6,), seconds=1)),
    _part("Fig. 13", 10, partial(study.search_times, sizes=(3, 4), seeds=2, seconds=5)),
    _part("Fig. 14b", 10, partial(study.granularity, num_modules=4, seeds=1, seconds=1)),
)
FULL = (
    _part("gains", 240, partial(study.gains, seeds=8, num_modules=10, seconds=5)),
    _part("10 modules", 120, partial(study.ten_modules, seeds=20, seconds=10)),
    _part("memory across stages", 900, partial(study.held_memory, seeds=5, sizes=(6, 9), seconds=10)),
    _part("Fig. 13", 600, partial(study.search_times, sizes=(3, 4, 5, 6, 8, 10, 12, 16), seeds=10, seconds=30)),
    _part("Fig. 14b", 600, partial(study.granularity, num_modules=10, seeds=5, seconds=5)),
)
STUDY = PartedStudy(name="bench_solver", quick=lambda: QUICK, quick_seconds=54.0, full=lambda: FULL)


if __name__ == "__main__":
    STUDY.main(__doc__, "few and small instances; within a minute on two cores")
