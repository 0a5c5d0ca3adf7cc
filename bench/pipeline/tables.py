"""The table of measured pipelines: a row for each model and number of ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.tables import number
from bench.pages import NOT_YET, newest_study, source_of, table
from bench.record import Figure, Study

NAME = "bench_pipeline_measured"
RIVALS = {
    "1f1b": "1F1B",
    "megatron": "interleaved",
    "gpipe": "GPipe",
}
HEADS = (
    "planned step, ms",
    *(f"{title} over it" for title in RIVALS.values()),
    "simulated tasks, median error, %",
    "fullest rank, MB",
    "simulated, MB",
)


def measured_table(results: Path) -> str:
    """Returns the steps of the newest kept study, and under it why something is missing."""
    study = newest_study(NAME, results)
    if study is None:
        return NOT_YET
    matches = (re.fullmatch(r"(.+): planned: step, ms", figure.name) for figure in study.figures)
    rows = [_row(study, match[1]) for match in matches if match is not None]
    reasons = dict.fromkeys(
        figure.reason for figure in study.figures if figure.reason and " over the planned one's" in figure.name
    )
    notes = "".join(f"\n{reason}.\n" for reason in reasons)
    return table((source_of(study), *HEADS), rows) + (f"\nMissing (-): {notes.lstrip()}" if notes else "")


def _row(study: Study, of: str) -> tuple[str, ...]:
    memory = f"{of}: planned: memory of the fullest rank, MB"
    return (
        of,
        _shown(study, f"{of}: planned: step, ms"),
        *(_shown(study, f"{of}: {rival}: step over the planned one's, ratio") for rival in RIVALS),
        _shown(study, f"{of}: simulated against measured tasks of a step, median error, % (goal: 5)"),
        _shown(study, memory),
        _shown(study, memory, source="simulated"),
    )


def _shown(study: Study, name: str, *, source: str = "measured") -> str:
    figures: Sequence[Figure] = [figure for figure in study.figures if (figure.name, figure.source) == (name, source)]
    if not figures or figures[0].value is None:
        return "-"
    figure = figures[0]
    if figure.low is None or figure.high is None or figure.low == figure.high:
        return number(figure.value)
    return f"{number(figure.value)} ({number(figure.low)} to {number(figure.high)})"
