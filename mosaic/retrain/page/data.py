"""The day's data: rows by source, what could not be read, and figures beside those of the days before."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mosaic.retrain.page.intervals import findings
from mosaic.retrain.page.markup import Markup, cell, element, folded, row, section, shorten, table, with_note
from mosaic.retrain.page.wording import NONE, figure
from mosaic.retrain.records import DayReport, SourceRows, Usual

MAX_SOURCES = 8
"""Sources that are shown; those with rejects first."""
MAX_REASONS = 3
MAX_FIGURES = 20
MAX_OPEN_FIGURES = 8
"""Usual figures that are shown without being asked for."""


def data(report: DayReport) -> Markup:
    """The section on today's data."""
    return section("data", "Data", findings(report.data_check), _sources(report.data), *_figures(report.usual))


def _sources(sources: Sequence[SourceRows]) -> Markup | None:
    if not sources:
        return None
    # Which sources are shown depends on their rejects; in which order they stand does not.
    by_rejects = sorted(sources, key=lambda one: not one.rejected)[:MAX_SOURCES]
    shown = [one for one in sources if one in by_rejects]
    rest = [one for one in sources if one not in by_rejects]
    lines = [
        row(
            with_note(shorten(one.name), _reasons(one)) if one.rejected else element("span", shorten(one.name)),
            *_counts(one.rows, one.drawn, sum(one.rejected.values())),
        )
        for one in shown
    ]
    if rest:
        rejected = sum(sum(one.rejected.values()) for one in rest)
        sums = (sum(one.rows for one in rest), sum(one.drawn for one in rest), rejected)
        lines.append(row(element("span", f"{len(rest)} more sources"), *_counts(*sums)))
    return table("Rows by source", ("Source", "Rows", "Drawn", "Rejected"), lines, class_="counts")


def _counts(*amounts: int) -> tuple[Markup, ...]:
    return tuple(cell(f"{amount:,}", class_="number") for amount in amounts)


def _reasons(one: SourceRows) -> str:
    ordered = sorted(one.rejected.items(), key=lambda item: (-item[1], item[0]))
    said = [f"{shorten(reason)}: {rows:,}" for reason, rows in ordered[:MAX_REASONS]]
    more = len(ordered) - MAX_REASONS
    return "rejected: " + "; ".join(said) + (f"; {more} more reasons" if more > 0 else "")


def is_unusual(one: Usual) -> bool:
    """Whether today's value is beyond its range; without a range nothing is."""
    below = one.low is not None and not one.today >= one.low
    return below or (one.high is not None and not one.today <= one.high)


def _figures(usual: Sequence[Usual]) -> tuple[Markup | None, ...]:
    ordered = sorted(usual, key=lambda one: not is_unusual(one))[:MAX_FIGURES]
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
            element("span", shorten(one.name)),
            cell(_picture(one), class_="plot"),
            cell(figure(one.today), class_="number today"),
            cell(with_note(figure(one.usual), _range(one)), class_="number before"),
            cell("✕ unusual" if is_unusual(one) else "new" if one.usual is None else "✓ as usual", class_="result"),
            class_="failed" if is_unusual(one) else "passed",
        )
        for one in shown
    ]
    return table(caption, ("Figure", "Today in its range", "Today", "Usual", "Result"), lines, class_="forest")


def _range(one: Usual) -> str | None:
    if one.low is None and one.high is None:
        return None
    if one.low is None or one.high is None:
        return f"at most {figure(one.high)}" if one.low is None else f"at least {figure(one.low)}"
    return f"{figure(one.low)} to {figure(one.high)}"


def _picture(one: Usual) -> Markup:
    known = [value for value in (one.today, one.usual, one.low, one.high) if value is not None and math.isfinite(value)]
    if len(known) < 2 or min(known) == max(known):
        return element("span", NONE, class_="faint", aria_hidden="true")
    room = 0.08 * (max(known) - min(known))
    start, width = min(known) - room, max(known) - min(known) + 2 * room

    def x(value: float) -> str:
        return f"{100 * (value - start) / width:.4g}%"

    drawn: list[Markup] = []
    if one.low is not None or one.high is not None:
        low = start if one.low is None else one.low
        high = start + width if one.high is None else one.high
        drawn.append(element("line", x1=x(low), x2=x(high), y1=14, y2=14, class_="usual"))
    if one.usual is not None:
        drawn.append(element("line", x1=x(one.usual), x2=x(one.usual), y1=8, y2=20, class_="limit"))
    if math.isfinite(one.today):
        drawn.append(element("circle", cx=x(one.today), cy=14, r=4.5))
    return element("svg", *drawn, height=28, aria_hidden="true")
