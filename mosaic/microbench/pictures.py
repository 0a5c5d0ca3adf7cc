"""The pictures of questions: bars, lines or a shaded table of measured numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mosaic.microbench.settings import Spread
from mosaic.report.figure import FAINT, GRID, INK, colors_of, ink_on, lighter, new_figure, shorten


def _axes_of(height: float, title: str, subtitle: str, *, x_axis: str = "", y_axis: str = "", empty: bool) -> Any:
    axes = new_figure([height], title=title, subtitle=subtitle, width=9.0).axes[0]
    axes.set_title(y_axis, loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(x_axis, color=INK)
    if empty:
        style = {"ha": "center", "va": "center", "color": FAINT}
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, **style)
    return axes


def bars_figure(title: str, subtitle: str, x_axis: str, bars: Sequence[tuple[str, str, Spread | float, str]]) -> Any:
    """Draws a bar with quartiles for each name, group with a common colour, length, and text behind the bar."""
    axes = _axes_of(0.34 * max(1, len(bars)) + 0.3, title, subtitle, x_axis=x_axis, empty=not bars)
    colors = colors_of(group for _, group, _, _ in bars)
    spreads = [value if isinstance(value, Spread) else Spread.of([value]) for _, _, value, _ in bars]
    longest = max((spread.third_quartile for spread in spreads), default=0) or 1.0
    axes.set(xlim=(0, longest * 1.03), ylim=(max(1, len(bars)) - 0.5, -0.5))
    axes.set_yticks(range(len(bars)), [shorten(name, 4.0) for name, *_ in bars])
    for row, ((_, group, _, text), spread) in enumerate(zip(bars, spreads, strict=True)):
        axes.barh(row, spread.median, height=0.6, color=colors[group])
        axes.plot((spread.first_quartile, spread.third_quartile), (row, row), color=INK, linewidth=1.2)
        axes.text(longest * 1.04, row, shorten(text, 6.0), va="center", fontsize=9, color=INK, parse_math=False)
    return axes.figure


def lines_figure(
    title: str,
    subtitle: str,
    x_axis: str,
    y_axis: str,
    lines: Mapping[str, Sequence[tuple[float, float, float, float]]],
) -> Any:
    """Draws a line for each name through places with median, first and third quartile; a level of 1 is dashed."""
    axes = _axes_of(3.8, title, subtitle, x_axis=x_axis, y_axis=y_axis, empty=not lines)
    axes.grid(color=GRID, linewidth=0.6)
    for name, color in colors_of(lines).items():
        places, middles, lows, highs = zip(*lines[name], strict=True)
        axes.plot(places, middles, color=color, marker="o", markersize=3.5, linewidth=1.6, label=name)
        axes.fill_between(places, lows, highs, color=color, alpha=0.18, linewidth=0)
    axes.axhline(1.0, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    if lines:
        axes.figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return axes.figure


def cells_figure(title: str, subtitle: str, y_axis: str, cells: Mapping[tuple[str, str], float | None]) -> Any:
    """Draws numbers by row and column, 1 white; None leaves a cell empty."""
    rows, columns = (list(dict.fromkeys(key[index] for key in cells)) for index in (0, 1))
    axes = _axes_of(0.3 * max(1, len(rows)) + 0.4, title, subtitle, y_axis=y_axis, empty=not cells)
    axes.set(xlim=(0, max(1, len(columns))), ylim=(max(1, len(rows)), 0))
    axes.set_xticks([x + 0.5 for x in range(len(columns))], columns, fontsize=9)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    values = {key: value for key, value in cells.items() if value is not None}
    worst = max((abs(value - 1) for value in values.values()), default=0) or 1.0
    for (row, column), value in values.items():
        x, y = columns.index(column), rows.index(row)
        color = lighter("#d55e00" if value > 1 else "#0072b2", 1 - 0.85 * abs(value - 1) / worst)
        axes.axvspan(x, x + 1, 1 - (y + 1) / len(rows), 1 - y / len(rows), facecolor=color, edgecolor="white")
        axes.text(x + 0.5, y + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=9, color=ink_on(color))
    return axes.figure
