"""How well does the cost model predict: held-out plans, surfaces, counts; and what do plans made with it cost?

``python -m bench.bench_cost [--quick] [--json FILE] [--pictures DIR]``

Everything that judges is measured after, and apart from, all that is fitted. What two cores cannot show is simulated
as well, in figures of their own; on a GPU ``bench.gpu.__main__`` measures it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.cost.figures import COUNTS, FORMS, GOALS, RULES, error_name, step_name, verdict
from bench.cost.ground import FULL, QUICK, Scale
from bench.cost.study import CostStudy
from bench.gpu.bench import Bench
from bench.harness import Figure, Study, finish
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
    parser.add_argument("--pictures", type=Path, help="draw surfaces, predictions and residuals in this folder")
    given = parser.parse_args()
    scale, seconds = (QUICK, QUICK_S) if given.quick else (FULL, float("inf"))
    study(scale, seconds=seconds, path=given.json, pictures=given.pictures)


def study(scale: Scale, *, seconds: float, path: Path | None, pictures: Path | None = None) -> Study:
    """Measures and reports."""
    load, began = ForeignLoad(), Provenance.here()  # others may commit while it runs
    bench = Bench(backend=HostBackend(), budget=Budget(seconds), dry_run=False)
    run = CostStudy(bench, scale)
    figures = tuple(run.run())
    made = published(finish("bench_cost", figures, load, None), (path, pictures))
    made = replace(made, commit=began.commit, parts=tuple(run.parts))
    print("\n".join(["", *tables(figures)]))
    if path is not None:
        save(made, path)
    if pictures is not None:
        from bench.cost_pictures import draw_all

        for drawn in draw_all(run, pictures):
            print(f"drew {drawn}")
    return made


def published(made: Study, paths: Iterable[Path | None]) -> Study:
    """Returns a study whose command names no folder of this machine."""
    command = made.command
    for path in paths:
        command = command.replace(str(path), path.name) if path is not None else command
    return replace(made, command=command)


def tables(figures: Sequence[Figure]) -> list[str]:
    """Returns the lines of a table for each kind of figure: measured and simulated ones never share one."""
    lines = []
    for rule in ("", *RULES):
        kind = f"simulated, bandwidth shared {rule}" if rule else "measured"
        lines += _table(
            f"prediction error of held-out plans ({kind})", figures, lambda n, f, r=rule: error_name(n, f, rule=r)
        )
        lines += _table(f"step over the unaware plan's ({kind})", figures, lambda n, f, r=rule: step_name(n, f, rule=r))
    goals = [figure for figure in figures if figure.name in GOALS]
    shown = ", ".join(f"{sum(verdict(f) == v for f in goals)} {v}" for v in ("met", "not met", "not measured"))
    return [*lines, f"goals: {shown}"]


def _table(title: str, figures: Sequence[Figure], name: object) -> list[str]:
    by_name = {figure.name: figure for figure in figures}
    lines = [title, f"{'modules':22}" + "".join(f"{count:>9}" for count in COUNTS)]
    for form, words in FORMS.items():
        found = [by_name.get(name(count, form)) for count in COUNTS]  # type: ignore[operator]
        cells = ["-" if f is None or f.value is None else f"{f.value:.4f}" for f in found]
        lines.append(f"{words:22}" + "".join(f"{cell:>9}" for cell in cells))
    return [*lines, ""]


if __name__ == "__main__":
    main()
