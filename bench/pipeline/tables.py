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
    made = newest_study(NAME, results)
    if made is None:
        return NOT_YET
    found = (re.fullmatch(r"(.+): planned: step, ms", one.name) for one in made.figures)
    rows = [_row(made, match[1]) for match in found if match is not None]
    reasons = dict.fromkeys(one.reason for one in made.figures if one.reason and " over the planned one's" in one.name)
    notes = "".join(f"\n{reason}.\n" for reason in reasons)
    return table((source_of(made), *HEADS), rows) + (f"\nMissing (-): {notes.lstrip()}" if notes else "")


def _row(made: Study, of: str) -> tuple[str, ...]:
    memory = f"{of}: planned: memory of the fullest rank, MB"
    return (
        of,
        _shown(made, f"{of}: planned: step, ms"),
        *(_shown(made, f"{of}: {rival}: step over the planned one's, ratio") for rival in RIVALS),
        _shown(made, f"{of}: simulated against measured tasks of a step, median error, % (goal: 5)"),
        _shown(made, memory),
        _shown(made, memory, source="simulated"),
    )


def _shown(made: Study, name: str, *, source: str = "measured") -> str:
    figures: Sequence[Figure] = [one for one in made.figures if (one.name, one.source) == (name, source)]
    if not figures or figures[0].value is None:
        return "-"
    one = figures[0]
    if one.low is None or one.high is None or one.low == one.high:
        return number(one.value)
    return f"{number(one.value)} ({number(one.low)} to {number(one.high)})"
