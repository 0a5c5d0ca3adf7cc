"""Tables of the study of long sequences: balance and communication."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bench.pages import source_of, table
from bench.record import Study

_BALANCE = re.compile(r"(?P<of>\w+, \d+ tokens, \d+ ranks): (?P<by>.*): most (?P<what>pairs|tiles) over mean")
_RECEIVED = re.compile(
    r"(?P<of>.*, \d+ ranks), (?P<by>[^,]*(?:, chunk.*)?): received over gathering all, mean of ranks"
)


def balance_table(study: Study) -> str:
    """Returns the imbalance per mask and method, as mean (worst) of random masks."""
    cells: dict[str, dict[str, str]] = {}
    for figure in study.figures:
        if (match := _BALANCE.fullmatch(figure.name)) is not None:
            row = cells.setdefault(f"{match['of']}, {match['what']}", {})
            row[match["by"]] = f"{_ratio(figure.value)} ({_ratio(float(figure.labels['worst']))})"
    return _grid(study, cells)


def received_table(study: Study) -> str:
    """Returns the received share of all remote blocks, and the imbalance."""
    values = {figure.name: figure.value for figure in study.figures}
    cells: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        if (match := _RECEIVED.fullmatch(name)) is not None:
            even = values[f"{match['of']}, {match['by']}: most pairs over mean"]
            cells.setdefault(match["of"], {})[match["by"]] = f"{_ratio(value)} / {_ratio(even)}"
    return _grid(study, cells)


def _grid(study: Study, cells: Mapping[str, Mapping[str, str]]) -> str:
    columns: Sequence[str] = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [(of, *(row.get(column, "") for column in columns)) for of, row in cells.items()]
    return table((source_of(study), *columns), rows)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if 1 <= value < 1.1 else f"{value:.2f}"
