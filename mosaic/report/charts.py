"""Lines, bars and matrices of measured numbers, for pictures of studies with their own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosaic.report.canvas import Canvas, check_path
from mosaic.report.palette import FAINT, GRID, INK, colors_of, ink_on, lighter

_WIDTH = 9.0
_LEFT, _RIGHT, _HEAD, _FOOT = 0.6, 0.3, 1.0, 0.75


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
    check_path(path)
    canvas = Canvas(width=_WIDTH, height=5.2)
    _head(canvas, words)
    axes = canvas.panel(_LEFT, _HEAD, _WIDTH - _LEFT - 2.2, 5.2 - _HEAD - _FOOT)
    axes.grid(color=GRID, linewidth=0.6)
    colors = colors_of(line.name for line in lines)
    for line in lines:
        places, middles, lows, highs = zip(*line.points, strict=True) if line.points else ((),) * 4
        axes.plot(places, middles, color=colors[line.name], marker="o", markersize=3.5, linewidth=1.6)
        axes.fill_between(places, lows, highs, color=colors[line.name], alpha=0.18, linewidth=0)
    if level is not None:
        axes.axhline(level, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(words.x_axis, color=INK, fontsize=10)
    _key(canvas, colors)
    _nothing(axes, bool(lines))
    canvas.save(path)


def draw_bars(bars: Sequence[Bar], words: Words, path: Path, *, level: float | None = None) -> None:
    """Writes horizontal bars with their values, as .png or .svg; ``level`` is drawn down."""
    check_path(path)
    height = _HEAD + _FOOT + 0.34 * max(1, len(bars))
    canvas = Canvas(width=_WIDTH, height=height)
    _head(canvas, words)
    left = min(4.4, 0.35 + max((canvas.measure(bar.name) for bar in bars), default=1.0))
    axes = canvas.panel(left, _HEAD, _WIDTH - left - 2.3, height - _HEAD - _FOOT)
    colors = colors_of(bar.group for bar in bars)
    longest = max((bar.quartiles[1] if bar.quartiles else bar.value or 0 for bar in bars), default=0) or 1.0
    axes.set(xlim=(0, longest * 1.03), ylim=(max(1, len(bars)), 0), yticks=())
    for row, bar in enumerate(bars):
        _bar(canvas, axes, bar, row, (left, height), colors[bar.group])
    if level is not None:
        axes.axvline(level, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlabel(words.x_axis, color=INK, fontsize=10)
    _nothing(axes, bool(bars))
    canvas.save(path)


def draw_matrix(
    rows: Sequence[str], columns: Sequence[str], values: dict[tuple[str, str], float], words: Words, path: Path
) -> None:
    """Writes a table of numbers shaded by size, 1 white, as .png or .svg; a cell without a number stays empty."""
    check_path(path)
    probe = Canvas(width=1, height=1)
    left = 0.35 + max((probe.measure(row) for row in rows), default=1.0)
    wide = max(0.75, 0.2 + max((probe.measure(column, 9) for column in columns), default=0.6))
    width = max(_WIDTH, left + wide * len(columns) + _RIGHT)
    canvas = Canvas(width=width, height=_HEAD + 0.45 + 0.3 * max(1, len(rows)) + 0.3)
    _head(canvas, words)
    axes = canvas.panel(left, _HEAD + 0.35, wide * max(1, len(columns)), 0.3 * max(1, len(rows)))
    axes.set(xlim=(0, max(1, len(columns))), ylim=(max(1, len(rows)), 0), xticks=(), yticks=())
    axes.spines["bottom"].set_visible(False)
    worst = max((abs(value - 1) for value in values.values()), default=0) or 1.0
    for x, column in enumerate(columns):
        canvas.text(left + wide * x + 0.06, _HEAD + 0.25, column, size=9)
    for y, row in enumerate(rows):
        canvas.text(0.2, _HEAD + 0.35 + 0.3 * y + 0.2, row)
        for x, column in enumerate(columns):
            value = values.get((row, column))
            if value is not None:
                color = lighter("#d55e00" if value > 1 else "#0072b2", 1 - 0.85 * abs(value - 1) / worst)
                canvas.bar(axes, (x, y, 1, 1), color, edgecolor="white")
                axes.text(x + 0.5, y + 0.55, f"{value:.2f}", ha="center", va="center", fontsize=9, color=ink_on(color))
    _nothing(axes, bool(values))
    canvas.save(path)


def _head(canvas: Canvas, words: Words) -> None:
    canvas.text(0.2, 0.34, words.title, size=12.5, fontweight="bold")
    canvas.text(0.2, 0.58, words.subtitle, size=9, color=FAINT)
    if words.y_axis:
        canvas.text(0.2, 0.86, words.y_axis, size=9.5)


def _key(canvas: Canvas, colors: dict[str, str]) -> None:
    axes = canvas.panel(0, 0, canvas.width, canvas.height)
    axes.set_axis_off()
    axes.set(xlim=(0, canvas.width), ylim=(canvas.height, 0), zorder=-1)
    left = canvas.width - 2.1
    for row, (name, color) in enumerate(colors.items()):
        top = _HEAD + 0.24 * row
        canvas.bar(axes, (left, top, 0.24, 0.12), color)
        canvas.text(left + 0.34, top + 0.12, name, size=9)


def _bar(canvas: Canvas, axes: Any, bar: Bar, row: int, frame: tuple[float, float], color: str) -> None:
    baseline = _HEAD + (row + 0.62) * (frame[1] - _HEAD - _FOOT) / axes.get_ylim()[0]
    canvas.text(0.2, baseline, canvas.shorten(bar.name, frame[0] - 0.3))
    if bar.value is None:
        canvas.text(frame[0] + 0.1, baseline, bar.text, size=9, color=FAINT)
        return
    canvas.bar(axes, (0, row + 0.2, bar.value, 0.6), color)
    if bar.quartiles is not None:
        axes.plot(bar.quartiles, (row + 0.5, row + 0.5), color=INK, linewidth=1.2)
    canvas.text(_WIDTH - 2.15, baseline, bar.text, size=9)


def _nothing(axes: Any, drawn: bool) -> None:
    if not drawn:
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center", va="center", color=FAINT)
