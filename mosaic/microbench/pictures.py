"""The pictures of a question: bars, lines or a shaded table of measured numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosaic.microbench.settings import Spread
from mosaic.report.figure import FAINT, GRID, INK, colors_of, ink_on, lighter, new_figure, save_figure, shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Bars, lines or cells under a title."""

    title: str
    x_axis: str = ""
    """Below the horizontal axis, unit included."""
    y_axis: str = ""
    """Above the vertical axis, unit included."""
    bars: Sequence[tuple[str, str, Spread | float | None, str]] = ()
    """Name, group with a common colour, length, and the text behind the bar."""
    lines: Mapping[str, Sequence[tuple[float, float, float, float]]] | None = None
    """By name: horizontal places with median, first and third quartile; a level of 1 is drawn across."""
    cells: Mapping[tuple[str, str], float | None] | None = None
    """Numbers by row and column, 1 white; None leaves a cell empty."""


def draw_picture(picture: Picture, path: Path, *, subtitle: str, absent: Sequence[tuple[str, str]] = ()) -> None:
    """Writes the picture as .png or .svg; ``absent`` bars have a reason in the place of a length."""
    bars = [*picture.bars, *((name, "", None, reason) for name, reason in absent)]
    rows = list(dict.fromkeys(row for row, _ in picture.cells or ()))
    height = 3.8
    if picture.lines is None:
        height = 0.3 * max(1, len(rows)) + 0.4 if picture.cells is not None else 0.34 * max(1, len(bars)) + 0.3
    figure = new_figure([height], title=picture.title, subtitle=subtitle, width=9.0)
    axes = figure.axes[0]
    axes.set_title(picture.y_axis, loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(picture.x_axis, color=INK)
    if picture.lines is not None:
        _draw_lines(figure, axes, picture.lines)
    elif picture.cells is not None:
        _draw_cells(axes, {key: value for key, value in picture.cells.items() if value is not None}, picture.cells)
    else:
        _draw_bars(axes, bars)
    if not (bars if picture.lines is None and picture.cells is None else picture.lines or picture.cells):
        style = {"ha": "center", "va": "center", "color": FAINT}
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, **style)
    save_figure(figure, path)


def _draw_lines(figure: Any, axes: Any, lines: Mapping[str, Sequence[tuple[float, float, float, float]]]) -> None:
    axes.grid(color=GRID, linewidth=0.6)
    for name, color in colors_of(lines).items():
        places, middles, lows, highs = zip(*lines[name], strict=True)
        axes.plot(places, middles, color=color, marker="o", markersize=3.5, linewidth=1.6, label=name)
        axes.fill_between(places, lows, highs, color=color, alpha=0.18, linewidth=0)
    axes.axhline(1.0, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    if lines:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)


def _draw_bars(axes: Any, bars: Sequence[tuple[str, str, Spread | float | None, str]]) -> None:
    colors = colors_of(group for _, group, _, _ in bars)
    spreads = [
        None if value is None else (value,) * 3 if isinstance(value, float)
        else (value.first_quartile, value.median, value.third_quartile)
        for _, _, value, _ in bars
    ]  # fmt: skip
    longest = max((spread[2] for spread in spreads if spread), default=0) or 1.0
    axes.set(xlim=(0, longest * 1.03), ylim=(max(1, len(bars)) - 0.5, -0.5))
    axes.set_yticks(range(len(bars)), [shorten(name, 4.0) for name, *_ in bars])
    for row, ((_, group, _, text), spread) in enumerate(zip(bars, spreads, strict=True)):
        color, x = FAINT, longest * 0.01
        if spread is not None:
            first, middle, third = spread
            axes.barh(row, middle, height=0.6, color=colors[group])
            axes.plot((first, third), (row, row), color=INK, linewidth=1.2)
            color, x = INK, longest * 1.04
        axes.text(x, row, shorten(text, 6.0), va="center", fontsize=9, color=color, parse_math=False)


def _draw_cells(axes: Any, values: Mapping[tuple[str, str], float], keys: Mapping[tuple[str, str], object]) -> None:
    rows, columns = (list(dict.fromkeys(key[index] for key in keys)) for index in (0, 1))
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
