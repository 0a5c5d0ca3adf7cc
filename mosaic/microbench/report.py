"""The renderer of results: writes the table and the picture of a question's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mosaic.microbench.result import Result, Spread
from mosaic.profile import note_of_others
from mosaic.report.charts import Bar, Line, Words, draw_bars, draw_lines, draw_matrix
from mosaic.report.frame import empty_table, plain

if TYPE_CHECKING:
    from rich.table import Table

Value = str | int | float | Spread | None
"""One cell; None is printed as ``-``, a spread as median and quartiles."""
Heading = tuple[str, int | None]
"""Heading of a column, and the digits of its numbers; None for text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Bars, lines or a matrix; exactly one is not None."""

    title: str
    """First line."""
    x_axis: str = ""
    """Below the horizontal axis, unit included."""
    y_axis: str = ""
    """Above the vertical axis, unit included."""
    bars: Sequence[Bar] | None = None
    """Horizontal bars, then absent measurements with their reasons."""
    lines: Sequence[Line] | None = None
    """Lines over one axis, whose level is 1."""
    cells: Mapping[tuple[str, str], float | None] | None = None
    """Numbers by row and column, in order; None leaves a cell empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Content of one question's table and picture."""

    title: str
    """Above the table."""
    headings: Sequence[Heading]
    """From left to right."""
    rows: Sequence[Sequence[Value]]
    """From top to bottom."""
    merged: bool = False
    """Write the first column once for equal neighbours."""
    summary: Sequence[str] = ()
    """Lines below the table."""
    picture: Picture
    """The picture."""


def make_table(result: Result, report: Report) -> Table:
    """Returns the table, with lines on absent and left-out measurements and on the machine."""
    digits_of = [digits for _, digits in report.headings]
    rows = [[_cell(value, digits) for value, digits in zip(row, digits_of, strict=True)] for row in report.rows]
    title = f"{report.title}: {result.origin.device.name}"
    columns = [(words, digits is not None) for words, digits in report.headings]
    table = empty_table(title, "\n".join([*report.summary, *_caption(result)]), columns)
    above = ""
    for first, *others in rows:
        table.add_row(*plain(["" if report.merged and first == above else first, *others]))
        above = first
    return table


def draw(result: Result, picture: Picture, path: Path) -> None:
    """Writes the picture as .png or .svg."""
    words = Words(title=picture.title, subtitle=_where(result), x_axis=picture.x_axis, y_axis=picture.y_axis)
    if picture.bars is not None:
        absent = [Bar(name=each.what, text=f"not measured: {each.reason}") for each in result.absent]
        draw_bars([*picture.bars, *absent], words, path)
    elif picture.lines is not None:
        draw_lines(picture.lines, words, path, level=1.0)
    else:
        cells = picture.cells or {}
        rows, columns = (list(dict.fromkeys(key[index] for key in cells)) for index in (0, 1))
        finite_cells = {key: value for key, value in cells.items() if value is not None}
        draw_matrix(rows, columns, finite_cells, words, path)


def bar_of(name: str, group: str, spread: Spread, text: str) -> Bar:
    """Returns a bar with quartiles."""
    return Bar(
        name=name, group=group, value=spread.median, quartiles=(spread.first_quartile, spread.third_quartile), text=text
    )


def spread_text(spread: Spread | None, digits: int | None = None) -> str:
    """Returns median and quartiles: ``1.23 (1.20-1.31)``."""
    if spread is None:
        return "-"
    places = digits if digits is not None else 1 if spread.median >= 100 else 3
    return f"{spread.median:.{places}f} ({spread.first_quartile:.{places}f}-{spread.third_quartile:.{places}f})"


def number_text(value: float | None, digits: int = 2) -> str:
    """Returns a number, ``-`` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def _cell(value: Value, digits: int | None) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Spread):
        return spread_text(value)
    return str(value) if isinstance(value, int) else number_text(value, digits or 0)


def _where(result: Result) -> str:
    origin = result.origin
    driver = f", driver CUDA {origin.driver_version}" if origin.driver_version else ""
    slots = "host" if origin.device.kind == "host" else f"{origin.device.num_slots} slots"
    where = f"{origin.device.name} ({slots}), torch {origin.torch_version}{driver}, {origin.provenance.created[:10]}"
    return "; ".join(filter(None, (where, note_of_others(origin.foreign_cpu_share, origin.device))))


def _caption(result: Result) -> list[str]:
    origin = result.origin
    share = "unknown" if origin.foreign_cpu_share is None else f"{origin.foreign_cpu_share:.0%}"
    lines = [f"not measured: {absent.what}: {absent.reason}" for absent in result.absent]
    lines += [f"no time left for {piece}" for piece in result.left_out[:5]]
    if len(result.left_out) > 5:
        lines.append(f"no time left for {len(result.left_out) - 5} more, which the JSON file names")
    lines += [f"note: {note}" for note in origin.notes]
    lines.append(
        f"medians (quartiles), measured in {origin.seconds:.1f} s with torch {origin.torch_version}"
        + (f" and CUDA driver {origin.driver_version}" if origin.driver_version else "")
        + f"; other processes took {share} of the CPU"
    )
    return lines
