"""The table of the study: a row for each model."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.tables import number
from bench.never_slower.turns import AGAIN, LOST_MS, LOST_STEPS, PLAIN_MS, RATIO, REPAID
from bench.pages import NOT_YET, newest_study, source_of, table
from bench.record import Figure, Study

HEADS = (
    "plain step, ms",
    "plain step over ours",
    "two plain loops, likewise",
    "what ran after the trial",
    "lost by the trial, ms",
)
MORE_HEADS = ("in plain steps", "repaid after, steps", "CPU taken by others")


def never_slower_table(results: Path) -> str:
    """Returns what came of the newest kept study."""
    made = newest_study("bench_never_slower", results)
    if made is None:
        return NOT_YET
    rows = [_row(made, ratio) for ratio in made.figures if ratio.name.endswith(RATIO)]
    return table((source_of(made), *HEADS, *MORE_HEADS), rows)


def _row(made: Study, ratio: Figure) -> tuple[str, ...]:
    model = ratio.labels["model"]
    found = {figure.name.removeprefix(f"{model}: "): figure for figure in made.figures}
    own = {name: figure.value for name, figure in found.items()}
    numbers = [number(own.get(name)) for name in (LOST_MS, LOST_STEPS, REPAID)]
    share = ratio.labels["foreign CPU share"]
    intervals = (_interval(ratio), _interval(found.get(AGAIN)))
    return (model, number(own.get(PLAIN_MS)), *intervals, ratio.labels["runs"], *numbers, share)


def _interval(ratio: Figure | None) -> str:
    if ratio is None or ratio.value is None:
        return "-"
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
