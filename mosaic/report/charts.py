"""Lines, bars and matrices of measured numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosaic.report.figure import check_path, new_figure, save_figure, shorten
from mosaic.report.palette import FAINT, GRID, INK, colors_of, ink_on, lighter


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Texts around a picture."""

    title: str
    """First line."""
    subtitle: str
    """Second line: place and date of the measurement."""
    x_axis: str = ""
    """Below the horizontal axis, unit included."""
    y_axis: str = ""
    """Above the vertical axis, unit included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line with its quartiles."""

    name: str
    """For the legend."""
    points: tuple[tuple[float, float, float, float], ...]
    """Horizontal place, median, first and third quartile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar with its quartiles, or a reason in its place."""

    name: str
    """In front of the bar."""
    group: str = ""
    """Bars of one group have one colour."""
    value: float | None = None
    """Median; None without a value."""
    quartiles: tuple[float, float] | None = None
    """First and third quartile."""
    text: str = ""
    """Behind the bar: its value and unit, or the reason."""


def draw_lines(lines: Sequence[Line], words: Words, path: Path, *, level: float | None = None) -> None:
    """Writes lines over one axis, both axes from zero, as .png or .svg; ``level`` is drawn across."""
    figure, axes = _figure(path, 3.8, words)
    axes.grid(color=GRID, linewidth=0.6)
    colors = colors_of(line.name for line in lines)
    for line in lines:
        places, middles, lows, highs = zip(*line.points, strict=True) if line.points else ((),) * 4
        axes.plot(places, middles, color=colors[line.name], marker="o", markersize=3.5, linewidth=1.6, label=line.name)
        axes.fill_between(places, lows, highs, color=colors[line.name], alpha=0.18, linewidth=0)
    if level is not None:
        axes.axhline(level, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    if lines:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    _save(figure, axes, path, is_empty=not lines)


def draw_bars(bars: Sequence[Bar], words: Words, path: Path, *, level: float | None = None) -> None:
    """Writes horizontal bars with their values, as .png or .svg; ``level`` is drawn down."""
    figure, axes = _figure(path, 0.34 * max(1, len(bars)) + 0.3, words)
    colors = colors_of(bar.group for bar in bars)
    longest = max((bar.quartiles[1] if bar.quartiles else bar.value or 0 for bar in bars), default=0) or 1.0
    axes.set(xlim=(0, longest * 1.03), ylim=(max(1, len(bars)) - 0.5, -0.5))
    axes.set_yticks(range(len(bars)), [shorten(bar.name, 4.0) for bar in bars])
    for row, bar in enumerate(bars):
        axes.barh(row, bar.value or 0, height=0.6, color=colors[bar.group])
        if bar.quartiles is not None:
            axes.plot(bar.quartiles, (row, row), color=INK, linewidth=1.2)
        color, x = (INK, longest * 1.04) if bar.value is not None else (FAINT, longest * 0.01)
        axes.text(x, row, shorten(bar.text, 7.0), va="center", fontsize=9, color=color, parse_math=False)
    if level is not None:
        axes.axvline(level, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    _save(figure, axes, path, is_empty=not bars)


def draw_matrix(
    rows: Sequence[str], columns: Sequence[str], values: dict[tuple[str, str], float], words: Words, path: Path
) -> None:
    """Writes a table of numbers shaded by size, 1 white, as .png or .svg; a cell without a number stays empty."""
    figure, axes = _figure(path, 0.3 * max(1, len(rows)) + 0.4, words)
    axes.set(xlim=(0, max(1, len(columns))), ylim=(max(1, len(rows)), 0))
    axes.set_xticks([x + 0.5 for x in range(len(columns))], columns, fontsize=9)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    worst = max((abs(value - 1) for value in values.values()), default=0) or 1.0
    for (row, column), value in values.items():
        x, y = columns.index(column), rows.index(row)
        color = lighter("#d55e00" if value > 1 else "#0072b2", 1 - 0.85 * abs(value - 1) / worst)
        axes.axvspan(x, x + 1, 1 - (y + 1) / len(rows), 1 - y / len(rows), facecolor=color, edgecolor="white")
        axes.text(x + 0.5, y + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=9, color=ink_on(color))
    _save(figure, axes, path, is_empty=not values)


def _figure(path: Path, height: float, words: Words) -> tuple[Any, Any]:
    check_path(path)
    figure = new_figure([height], title=words.title, subtitle=words.subtitle, width=9.0)
    axes = figure.axes[0]
    axes.set_title(words.y_axis, loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(words.x_axis, color=INK)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path, *, is_empty: bool) -> None:
    if is_empty:
        style = {"ha": "center", "va": "center", "color": FAINT}
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, **style)
    save_figure(figure, path)
