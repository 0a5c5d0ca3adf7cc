"""Tasks that come and go: the time lost at each change, and what the loop takes in all.

``python -m bench.changing [--quick] [--json FILE]``

Spindle's dynamic workload (appendix D): a Multitask-CLIP of six modalities whose set of tasks changes four times. The
plain loop, ``handle.replan``, Spindle's own way (save, start anew, load) and the first plan kept are compared in one
run, in turn. Trials take part as they do by default; their steps are steps of a phase.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.changing.phases import figures_of, go_through, process_figure
from bench.changing.workload import FULL, QUICK, Scale
from bench.harness import finish, published
from bench.record import Study
from mosaic.artifact import save
from mosaic.profiler import ForeignLoad


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps; within a minute on two cores")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    study(QUICK if given.quick else FULL, path=given.json)


def study(scale: Scale, *, path: Path | None) -> Study:
    """Measures and reports."""
    load = ForeignLoad()
    figures = figures_of(scale.phases, go_through(scale))
    figures.append(process_figure())
    made = published(finish("bench_changing", figures, load, None), (path,))
    if path is not None:
        save(made, path)
    return made


if __name__ == "__main__":
    main()
