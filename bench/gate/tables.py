"""The table of the gate's error rates: each margin with the rows that have to resolve it."""

from __future__ import annotations

from pathlib import Path

from bench import pages
from bench.record import Figure

STUDY = "bench_gate"
HEADS = (
    "equal models refused, %",
    "predicted before",
    "promoted, loss is the margin, %",
    "promoted, loss is 1.5 margins, %",
)


def margins_table(results: Path) -> str:
    """Returns how often the gate was wrong, by margin and rows, in the newest study."""
    newest = pages.newest_study(STUDY, results)
    if newest is None:
        return pages.NOT_YET
    rows: dict[str, list[str]] = {}
    for figure in newest.figures:
        if figure.name.startswith("margin "):
            rows.setdefault(figure.name.split(":")[0], []).append(_shown(figure))
    return pages.table((pages.source_of(newest), *HEADS), [(name, *cells) for name, cells in rows.items()])


def _shown(figure: Figure) -> str:
    if figure.value is None:
        return ""
    interval = f" ({figure.low:.1f} to {figure.high:.1f})" if figure.low is not None else ""
    return f"{figure.value:.1f}{interval}"
