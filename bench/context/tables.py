"""Tables of the newest study of long sequences: balance, what has to travel, and Cornstarch's times beside ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.gpu.tables import number
from bench.pages import NOT_YET, newest_study, source_of, table
from bench.record import Study

THEIRS: Mapping[tuple[str, str], tuple[float, float, float, float]] = MappingProxyType(
    {
        ("16384", "EP"): (3.92, 3.93, 4.24, 3.96),
        ("16384", "EE"): (4.31, 4.32, 4.86, 4.37),
        ("16384", "MP"): (3.00, 2.99, 3.12, 3.08),
        ("32768", "EP"): (10.01, 10.07, 11.76, 10.21),
        ("32768", "EE"): (11.12, 11.12, 13.43, 11.60),
        ("32768", "MP"): (6.09, 6.18, 6.76, 6.57),
        ("65536", "EP"): (25.43, 25.48, 32.24, 28.17),
        ("65536", "EE"): (36.99, 37.12, 46.67, 37.36),
        ("65536", "MP"): (14.18, 14.15, 16.56, 15.33),
    }
)
"""Cornstarch's Table 4 as printed, ms on eight A40: LPT, random, naive ring, zigzag, by tokens and mask."""
_WAYS = ("LPT", "random", "naive ring", "zigzag", "ours")
_BALANCE = re.compile(r"(?P<of>\w+, \d+ tokens, \d+ ranks): (?P<by>.*): most (?P<what>pairs|tiles) over mean")
_RECEIVED = re.compile(
    r"(?P<of>.*, \d+ ranks), (?P<by>[^,]*(?:, chunk.*)?): received over gathering all, mean of ranks"
)
_TABLE_4 = re.compile(r"Cornstarch Table 4: (?P<mask>\w+), (?P<tokens>\d+) tokens, (?P<by>.*): attention, ms")


def balance_table(results: Path) -> str:
    """Returns most over mean for each mask and method, mean (worst) of the masks drawn."""
    study = newest_study("bench_context", results)
    if study is None:
        return NOT_YET
    cells: dict[str, dict[str, str]] = {}
    for figure in study.figures:
        if (found := _BALANCE.fullmatch(figure.name)) is not None:
            row = cells.setdefault(f"{found['of']}, {found['what']}", {})
            row[found["by"]] = f"{_ratio(figure.value)} ({_ratio(float(figure.labels['worst']))})"
    return _grid(study, cells)


def received_table(results: Path) -> str:
    """Returns what a rank receives as a share of gathering everything, and most over mean."""
    study = newest_study("bench_context", results)
    if study is None:
        return NOT_YET
    values = {figure.name: figure.value for figure in study.figures}
    cells: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        if (found := _RECEIVED.fullmatch(name)) is not None:
            even = values[f"{found['of']}, {found['by']}: most pairs over mean"]
            cells.setdefault(found["of"], {})[found["by"]] = f"{_ratio(value)} / {_ratio(even)}"
    return _grid(study, cells)


def paper_times_table(results: Path) -> str:
    """Returns Cornstarch's Table 4: theirs as measured on A40, ours as predicted for it."""
    study = newest_study("bench_context", results)
    if study is None:
        return NOT_YET
    times: dict[tuple[str, str], dict[str, float]] = {}
    for figure in study.figures:
        if (found := _TABLE_4.fullmatch(figure.name)) is not None and figure.value is not None:
            times.setdefault((found["tokens"], found["mask"]), {})[found["by"]] = figure.value
    heads = (
        "tokens",
        "mask",
        *(f"{way}, theirs, ms" for way in _WAYS[:-1]),
        *(f"{way}, predicted, ms" for way in _WAYS),
    )
    rows = []
    for key, own in times.items():
        printed = [f"{ms:.2f}" for ms in THEIRS.get(key, ())] or [""] * 4
        rows.append((*key, *printed, *(number(own.get(way)) for way in _WAYS)))
    return table(heads, rows) + f"\nOurs: {source_of(study)}.\n"


def _grid(study: Study, cells: Mapping[str, Mapping[str, str]]) -> str:
    columns: Sequence[str] = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [(of, *(row.get(column, "") for column in columns)) for of, row in cells.items()]
    return table((source_of(study), *columns), rows)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if 1 <= value < 1.1 else f"{value:.2f}"
