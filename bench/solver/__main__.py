"""The study of the solvers on models and made-up instances: what a plan is worth, how sure it is, how fast it is.

``python -m bench.solver [--quick] [--json FILE] [--pictures DIR]``

Costs and gains are simulated, search times are measured on this machine. A figure that could not be had has no number
and a reason. Every part runs in a process of its own with a time after which it is ended, and the file is written anew
after each part, so that an interrupt loses only the part that runs. ``--quick``: within a minute on two quiet cores.
Without it: about half an hour, and never more than the parts' times together, which is printed first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.record import Figure
from bench.solver.gains import gains
from bench.solver.goals import table, with_missing
from bench.solver.models import gains_of_models
from bench.solver.paper import figure_13, figure_14a, figure_14b
from bench.solver.parts import held_memory, worth_of_parts
from bench.solver.pictures import draw
from bench.solver.proofs import ten_modules, twenty_modules
from bench.solver.zoo_ratios import ROWS, table_1_beside_the_zoo
from bench.study_parts import PartedStudy, StudyPart


def _gains_of_models(*, num_devices: Sequence[int], seconds: float) -> Iterator[Figure]:
    """As published on the paper's inputs, and with the ratios of its Table 1 where it has them."""
    yield from gains_of_models(size="paper", batch=32, num_devices=num_devices, seconds=seconds)
    of_table = tuple(ROWS)
    yield from gains_of_models(size="table1", batch=32, num_devices=num_devices, seconds=seconds, models=of_table)


QUICK_SECONDS = 54.0
"""After this a quick study ends whatever runs and starts nothing: the rest of its minute is for loading and writing."""
QUICK: tuple[StudyPart, ...] = (
    StudyPart.alone("the six models", 30, lambda: gains_of_models(size="tiny", batch=8, num_devices=(2,), seconds=1)),
    StudyPart.alone("gains", 25, lambda: gains(seeds=1, num_modules=5, seconds=1)),
    StudyPart.alone("10 modules", 10, lambda: ten_modules(seeds=2, seconds=10, disturbed=False)),
    StudyPart.alone("10 modules with interference", 10, lambda: ten_modules(seeds=1, seconds=0.5, disturbed=True)),
    StudyPart.alone("20 modules", 30, lambda: twenty_modules(seeds=1)),
    StudyPart.alone("memory across stages", 10, lambda: held_memory(seeds=1, sizes=(6,), seconds=1)),
    StudyPart.alone("Fig. 13", 10, lambda: figure_13(sizes=(3, 4), seeds=2, ablated=1, seconds=5)),
    StudyPart.alone("Fig. 14a", 10, lambda: figure_14a(seeds=2, seconds=2)),
    StudyPart.alone("Fig. 14b", 10, lambda: figure_14b(num_modules=4, seeds=1, seconds=1)),
    StudyPart.alone("worth of parts", 10, lambda: worth_of_parts(seeds=1, num_modules=6)),
    StudyPart.alone("Table 1", 20, lambda: table_1_beside_the_zoo(sizes=("table1",), zoo=("imagebind",))),
)
FULL: tuple[StudyPart, ...] = (
    StudyPart.alone("the six models", 600, lambda: _gains_of_models(num_devices=(2, 4, 8), seconds=5)),
    StudyPart.alone("gains", 240, lambda: gains(seeds=8, num_modules=10, seconds=5)),
    StudyPart.alone("10 modules", 120, lambda: ten_modules(seeds=20, seconds=10, disturbed=False)),
    StudyPart.alone("10 modules with interference", 120, lambda: ten_modules(seeds=4, seconds=2, disturbed=True)),
    StudyPart.alone("20 modules", 150, lambda: twenty_modules(seeds=5)),
    StudyPart.alone("memory across stages", 300, lambda: held_memory(seeds=5, sizes=(6, 7, 8, 9), seconds=10)),
    StudyPart.alone(
        "Fig. 13", 600, lambda: figure_13(sizes=(3, 4, 5, 6, 8, 10, 12, 16, 20), seeds=10, ablated=2, seconds=30)
    ),
    StudyPart.alone("Fig. 14a", 60, lambda: figure_14a(seeds=10, seconds=10)),
    StudyPart.alone("Fig. 14b", 600, lambda: figure_14b(num_modules=10, seeds=5, seconds=5)),
    StudyPart.alone("worth of parts", 150, lambda: worth_of_parts(seeds=5, num_modules=9)),
    StudyPart.alone("Table 1", 120, lambda: table_1_beside_the_zoo(sizes=("public", "paper", "table1"))),
)


STUDY = PartedStudy(
    name="bench_solver",
    quick=lambda: QUICK,
    quick_seconds=QUICK_SECONDS,
    full=lambda: FULL,
    complete=with_missing,
)


def main() -> None:
    """Runs the study."""
    made = STUDY.main(__doc__, "few and small instances; within a minute on two cores", draw)
    print("", "goals:", *table(made.figures), sep="\n")


if __name__ == "__main__":
    main()
