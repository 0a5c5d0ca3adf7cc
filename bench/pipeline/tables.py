"""The table of measured pipelines: a row per model and number of ranks."""

from __future__ import annotations

import re

from bench.pages import shown, source_of, table
from bench.record import Study

COLUMNS = {
    "planned step, ms": "planned: step, ms",
    "1F1B over it": "1f1b: step over the planned one's, ratio",
    "interleaved over it": "megatron: step over the planned one's, ratio",
    "GPipe over it": "gpipe: step over the planned one's, ratio",
    "simulated tasks, median error, %": "simulated against measured tasks of a step, median error, % (goal: 5)",
    "fullest rank, MB": "planned: memory of the fullest rank, MB",
}


def measured_table(study: Study) -> str:
    """Returns the steps of a study, with the simulated memory beside the measured one."""
    figures = {(figure.name, figure.source): figure for figure in study.figures}
    rows = []
    for name, source in figures:
        match = re.fullmatch(r"(.+): planned: step, ms", name)
        if match is not None and figures[name, source].value is not None:
            own = [shown(figures.get((f"{match[1]}: {column}", "measured"))) for column in COLUMNS.values()]
            memory = figures.get((f"{match[1]}: {COLUMNS['fullest rank, MB']}", "simulated"))
            rows.append((match[1], *own, shown(memory)))
    return table((source_of(study), *COLUMNS, "simulated, MB"), rows)
