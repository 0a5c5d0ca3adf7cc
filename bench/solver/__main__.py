"""The study of the solvers on models and made-up instances: what a plan is worth, how sure it is, how fast it is.

``python -m bench.solver [--quick] [--json FILE]``

Costs and gains are simulated, search times are measured on this machine. Every part runs in a process of its own with a
time after which it is ended, and the file is written anew after each part. ``--quick``: within a minute on two quiet
cores; without it about half an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from bench.record import Figure
from bench.solver import study
from bench.solver.zoo_ratios import ROWS, table_1_beside_the_zoo
from bench.study_parts import PartedStudy, StudyPart


def _gains_of_models(*, num_devices: Sequence[int], seconds: float) -> Iterator[Figure]:
    """As published on the paper's inputs, and with the ratios of its Table 1 where it has them."""
    yield from study.gains_of_models(size="paper", batch=32, num_devices=num_devices, seconds=seconds)
    yield from study.gains_of_models(
        size="table1", batch=32, num_devices=num_devices, seconds=seconds, models=tuple(ROWS)
    )


QUICK_SECONDS = 54.0
"""After this a quick study ends whatever runs and starts nothing: the rest of its minute is for loading and writing."""
_PARTS: Sequence[tuple[str, int, Callable[[], Iterable[Figure]], int, Callable[[], Iterable[Figure]]]] = (
    (
        "the six models",
        30,
        lambda: study.gains_of_models(size="tiny", batch=8, num_devices=(2,), seconds=1),
        600,
        lambda: _gains_of_models(num_devices=(2, 4, 8), seconds=5),
    ),
    (
        "gains",
        25,
        lambda: study.gains(seeds=1, num_modules=5, seconds=1),
        240,
        lambda: study.gains(seeds=8, num_modules=10, seconds=5),
    ),
    (
        "10 modules",
        10,
        lambda: study.ten_modules(seeds=2, seconds=10, disturbed=False),
        120,
        lambda: study.ten_modules(seeds=20, seconds=10, disturbed=False),
    ),
    (
        "10 modules with interference",
        10,
        lambda: study.ten_modules(seeds=1, seconds=0.5, disturbed=True),
        120,
        lambda: study.ten_modules(seeds=4, seconds=2, disturbed=True),
    ),
    ("20 modules", 30, lambda: study.twenty_modules(seeds=1), 150, lambda: study.twenty_modules(seeds=5)),
    (
        "memory across stages",
        10,
        lambda: study.held_memory(seeds=1, sizes=(6,), seconds=1),
        1800,
        lambda: study.held_memory(seeds=5, sizes=(6, 7, 8, 9), seconds=10),
    ),
    (
        "Fig. 13",
        10,
        lambda: study.search_times(sizes=(3, 4), seeds=2, seconds=5),
        600,
        lambda: study.search_times(sizes=(3, 4, 5, 6, 8, 10, 12, 16, 20), seeds=10, seconds=30),
    ),
    (
        "Fig. 14a",
        10,
        lambda: study.throughput(seeds=2, seconds=2),
        60,
        lambda: study.throughput(seeds=10, seconds=10),
    ),
    (
        "Fig. 14b",
        10,
        lambda: study.granularity(num_modules=4, seeds=1, seconds=1),
        600,
        lambda: study.granularity(num_modules=10, seeds=5, seconds=5),
    ),
    (
        "Table 1",
        20,
        lambda: table_1_beside_the_zoo(sizes=("table1",), zoo=("imagebind",)),
        120,
        lambda: table_1_beside_the_zoo(sizes=("paper", "table1")),
    ),
)
"""Name; seconds and figures of a quick study; seconds and figures of a full one."""
QUICK = tuple(StudyPart.alone(name, seconds, figures) for name, seconds, figures, _, _ in _PARTS)
FULL = tuple(StudyPart.alone(name, seconds, figures) for name, _, _, seconds, figures in _PARTS)

STUDY = PartedStudy(
    name="bench_solver",
    quick=lambda: QUICK,
    quick_seconds=QUICK_SECONDS,
    full=lambda: FULL,
    complete=study.with_missing,
)


def main() -> None:
    """Runs the study."""
    made = STUDY.main(__doc__, "few and small instances; within a minute on two cores")
    print("", "goals:", *study.goals_table(made.figures), sep="\n")


if __name__ == "__main__":
    main()
