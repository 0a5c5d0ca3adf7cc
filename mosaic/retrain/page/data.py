"""The day's data: rows by source, unreadable rows, and figures beside those of earlier days."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mosaic.retrain.page.intervals import findings
from mosaic.retrain.page.markup import Markup, cell, element, folded, row, section, shorten, table, with_note
from mosaic.retrain.page.wording import NONE, figure
from mosaic.retrain.records import DayReport, SourceRows, Usual

MAX_SOURCES = 8
"""Most sources on the page; those with rejects first."""
MAX_REASONS = 3
MAX_FIGURES = 20
MAX_OPEN_FIGURES = 8
"""Figures shown unfolded."""


def data(report: DayReport) -> Markup:
    """The section on today's data."""
    return section("data", "Data", findings(report.data_check), _sources(report.data), *_figures(report.usual))


def _sources(sources: Sequence[SourceRows]) -> Markup | None:
    if not sources:
        return None
    # Rejects decide which sources are shown, but not their order.
    by_rejects = sorted(sources, key=lambda source: not source.rejected)[:MAX_SOURCES]
    shown = [source for source in sources if source in by_rejects]
    hidden = [source for source in sources if source not in by_rejects]
    lines = [
        row(
            with_note(shorten(source.name), _reasons(source))
            if source.rejected
            else element("span", shorten(source.name)),
            *_counts(source.rows, source.drawn, sum(source.rejected.values())),
        )
        for source in shown
    ]
    if hidden:
        rejected = sum(sum(source.rejected.values()) for source in hidden)
        sums = (sum(source.rows for source in hidden), sum(source.drawn for source in hidden), rejected)
        lines.append(row(element("span", f"{len(hidden)} more sources"), *_counts(*sums)))
    return table("Rows by source", ("Source", "Rows", "Drawn", "Rejected"), lines, class_="counts")


def _counts(*amounts: int) -> tuple[Markup, ...]:
    return tuple(cell(f"{amount:,}", class_="number") for amount in amounts)


def _reasons(source: SourceRows) -> str:
    ordered = sorted(source.rejected.items(), key=lambda item: (-item[1], item[0]))
    texts = [f"{shorten(reason)}: {rows:,}" for reason, rows in ordered[:MAX_REASONS]]
    more = len(ordered) - MAX_REASONS
    return "rejected: " + "; ".join(texts) + (f"; {more} more reasons" if more > 0 else "")


def is_unusual(figure: Usual) -> bool:
    """Returns True if today's value is beyond its range."""
    below = figure.low is not None and not figure.today >= figure.low
    return below or (figure.high is not None and not figure.today <= figure.high)


def _figures(usual: Sequence[Usual]) -> tuple[Markup | None, ...]:
    ordered = sorted(usual, key=lambda figure_row: not is_unusual(figure_row))[:MAX_FIGURES]
    strange = sum(map(is_unusual, ordered))
    opened = len(ordered) if len(ordered) <= MAX_OPEN_FIGURES else strange
    rest = ordered[opened:]
    left_out = len(usual) - len(ordered)
    more = f"{len(rest)} more figures, as usual" if strange else f"All {len(rest)} figures are as usual"
    return (
        _table("Figures of today's data", ordered[:opened]) if opened else None,
        folded(more, _table("Figures of today's data that are as usual", rest)) if rest else None,
        element("p", f"{left_out} more figures in report.json.", class_="faint") if left_out else None,
    )


def _table(caption: str, shown: Sequence[Usual]) -> Markup:
    lines = [
        row(
            element("span", shorten(usual_row.name)),
            cell(_picture(usual_row), class_="plot"),
            cell(figure(usual_row.today), class_="number today"),
            cell(with_note(figure(usual_row.usual), _range(usual_row)), class_="number before"),
            cell(
                "✕ unusual" if is_unusual(usual_row) else "new" if usual_row.usual is None else "✓ as usual",
                class_="result",
            ),
            class_="failed" if is_unusual(usual_row) else "passed",
        )
        for usual_row in shown
    ]
    return table(caption, ("Figure", "Today in its range", "Today", "Usual", "Result"), lines, class_="forest")


def _range(usual: Usual) -> str | None:
    if usual.low is None and usual.high is None:
        return None
    if usual.low is None or usual.high is None:
        return f"at most {figure(usual.high)}" if usual.low is None else f"at least {figure(usual.low)}"
    return f"{figure(usual.low)} to {figure(usual.high)}"


def _picture(row: Usual) -> Markup:
    finite = [
        value for value in (row.today, row.usual, row.low, row.high) if value is not None and math.isfinite(value)
    ]
    if len(finite) < 2 or min(finite) == max(finite):
        return element("span", NONE, class_="faint", aria_hidden="true")
    room = 0.08 * (max(finite) - min(finite))
    start, width = min(finite) - room, max(finite) - min(finite) + 2 * room

    def x(value: float) -> str:
        return f"{100 * (value - start) / width:.4g}%"

    marks: list[Markup] = []
    if row.low is not None or row.high is not None:
        low = start if row.low is None else row.low
        high = start + width if row.high is None else row.high
        marks.append(element("line", x1=x(low), x2=x(high), y1=14, y2=14, class_="usual"))
    if row.usual is not None:
        marks.append(element("line", x1=x(row.usual), x2=x(row.usual), y1=8, y2=20, class_="limit"))
    if math.isfinite(row.today):
        marks.append(element("circle", cx=x(row.today), cy=14, r=4.5))
    return element("svg", *marks, height=28, aria_hidden="true")
