"""The table of the study: a row for each model."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.tables import number
from bench.never_slower.turns import LOST_MS, LOST_STEPS, PLAIN_MS, RATIO, REPAID
from bench.pages import NOT_YET, newest_study, source_of, table
from bench.record import Figure, Study

HEADS = ("plain step, ms", "plain step over ours", "what ran after the trial", "lost by the trial, ms")
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
    own = {figure.name.removeprefix(f"{model}: "): figure.value for figure in made.figures}
    interval = "-" if ratio.value is None else f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    numbers = [number(own.get(name)) for name in (LOST_MS, LOST_STEPS, REPAID)]
    share = ratio.labels["foreign CPU share"]
    return (model, number(own.get(PLAIN_MS)), interval, ratio.labels["runs"], *numbers, share)
