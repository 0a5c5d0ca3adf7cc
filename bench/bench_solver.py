"""How good, how sure and how fast are the solvers? On generated instances; see mosaic/solver/README.md.

``python -m bench.bench_solver [--quick] [--json FILE] [--pictures DIR]``

Costs and gains are simulated, search times are measured on this machine. A figure that could not be had has no number
and a reason. Without --quick: half an hour on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.harness import finish
from bench.record import Figure, Study, missing_figure
from bench.solver_gains import gains
from bench.solver_paper import figure_13, figure_14a, figure_14b
from bench.solver_pictures import draw
from bench.solver_proofs import sixty_four_modules, ten_modules, twenty_modules
from mosaic.profiler import ForeignLoad

Part = tuple[str, Callable[[], Sequence[Figure]]]

QUICK: tuple[Part, ...] = (
    ("10 modules", lambda: ten_modules(seeds=2, seconds=10, disturbed=False)),
    ("10 modules with interference", lambda: ten_modules(seeds=1, seconds=0.5, disturbed=True)),
    ("20 modules", lambda: twenty_modules(seeds=1)),
    ("64 modules", lambda: sixty_four_modules(seeds=1, limits=(2.0,))),
    ("gains", lambda: gains(seeds=2, num_modules=5, seconds=2)),
    ("Fig. 13", lambda: figure_13(sizes=(3, 4, 5), seconds=5)),
    ("Fig. 14a", lambda: figure_14a(seeds=2, seconds=2)),
    ("Fig. 14b", lambda: figure_14b(num_modules=4, seconds=2)),
)
FULL: tuple[Part, ...] = (
    ("10 modules", lambda: ten_modules(seeds=20, seconds=10, disturbed=False)),
    ("10 modules with interference", lambda: ten_modules(seeds=4, seconds=10, disturbed=True)),
    ("20 modules", lambda: twenty_modules(seeds=5)),
    ("64 modules", lambda: sixty_four_modules(seeds=2, limits=(3.0, 10.0, 60.0))),
    ("gains", lambda: gains(seeds=8, num_modules=10, seconds=10)),
    ("Fig. 13", lambda: figure_13(sizes=(3, 4, 5, 6, 8, 10, 12), seconds=60)),
    ("Fig. 14a", lambda: figure_14a(seeds=10, seconds=10)),
    ("Fig. 14b", lambda: figure_14b(num_modules=8, seconds=30)),
)


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and small instances; within a minute on two cores")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--pictures", type=Path, help="draw the figures into this folder")
    given = parser.parse_args()
    made = study(QUICK if given.quick else FULL, path=given.json)
    if given.pictures is not None:
        draw(made, given.pictures)


def study(parts: Sequence[Part], *, path: Path | None) -> Study:
    """Measures and reports; a part that fails becomes a figure with the reason and ends nothing else."""
    load = ForeignLoad()
    figures: list[Figure] = []
    for name, measure in parts:
        try:
            figures += measure()
        except Exception as error:
            figures.append(missing_figure(name, error))
    return finish("bench_solver", figures, load, path)


if __name__ == "__main__":
    main()
