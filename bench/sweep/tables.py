"""Outcomes of cases, and tables of their counts by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench import pages
from bench.record import Figure, Study

ON_LANES = "equal, on lanes"
NEAR = "equal within rounding"
"""On lanes of a GPU, whose libraries may choose other kernels there."""
IN_PLACE = "equal, in place"
REFUSED = "refused"
RAISED = "raised"
TOLD = "different, as told"
DIFFERENT = "different"
CRASHED = "crashed"
NO_PLAIN = "no plain loop"
"""The case says nothing about Mosaic: its plain loop fails, or differs from itself."""
EQUAL = "equal"
AS_TOLD = "equal, changed as told"
"""The model was refused, changed as the message says, and then equal."""

OUTCOMES = (ON_LANES, IN_PLACE, REFUSED, RAISED, TOLD, DIFFERENT, CRASHED)
"""Of a colocated case whose plain loop runs."""
CUDA_OUTCOMES = (ON_LANES, NEAR, *OUTCOMES[1:])
PIPELINE_OUTCOMES = (EQUAL, AS_TOLD, REFUSED, NO_PLAIN, DIFFERENT, CRASHED)
HEADS = {TOLD: "different, with a warning", AS_TOLD: "equal after the change"}
"""Heads of columns whose outcome has another name in kept files."""
FAULTS = (DIFFERENT, CRASHED)
"""Those that break what Mosaic promises."""

STUDY = "bench_sweep"
PIPELINE_STUDY = "bench_sweep_pipeline"
OPERATORS_STUDY = "bench_sweep_operators"


def counts_table(study: Study, outcomes: Sequence[str] = OUTCOMES) -> str:
    """Returns the counts of a sweep's outcomes by kind of case."""
    kinds = dict.fromkeys(figure.part for figure in study.figures)
    rows = [(kind, *_counts(study.of(kind), outcomes)) for kind in kinds]
    versions = "".join(f", {name} {version}" for name, version in study.versions.items())
    heads = (f"{pages.source_of(study)}{versions}", "cases", *(HEADS.get(name, name) for name in outcomes))
    return pages.table(heads, [*rows, ("all", *_counts(study.figures, outcomes))])


def operators_table(study: Study) -> str:
    """Returns the counts of operators by outcome, and the operators that were not equal on lanes."""
    names: dict[str, list[str]] = {}
    for figure in study.figures:
        names.setdefault(figure.labels["outcome"], []).append(f"`{figure.labels['case']}`")
    rows = [
        (outcome, str(len(names[outcome])), "" if outcome == ON_LANES else _some(names[outcome]))
        for outcome in (*OUTCOMES, NO_PLAIN)
        if outcome in names
    ]
    return pages.table((pages.source_of(study), "operators", "which"), rows)


def _counts(figures: Sequence[Figure], outcomes: Sequence[str]) -> tuple[str, ...]:
    ended = Counter(figure.labels["outcome"] for figure in figures)
    return (str(len(figures)), *(str(ended[outcome] or "") for outcome in outcomes))


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")
