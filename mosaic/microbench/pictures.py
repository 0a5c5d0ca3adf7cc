"""Axes and bars of the pictures of questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mosaic.microbench.settings import Spread
from mosaic.report.figure import FAINT, INK, colors_of, new_figure, shorten


def new_axes(height: float, title: str, subtitle: str, *, is_empty: bool, x_axis: str = "", y_axis: str = "") -> Any:
    """Returns the axes of a new figure, with the name of the vertical axis above them."""
    axes = new_figure([height], title=title, subtitle=subtitle, width=9.0).axes[0]
    axes.set_title(y_axis, loc="left", fontsize=9.5)
    axes.set_xlabel(x_axis)
    if is_empty:
        style = {"ha": "center", "va": "center", "color": FAINT}
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, **style)
    return axes


def bars_figure(title: str, subtitle: str, x_axis: str, bars: Sequence[tuple[str, str, Spread | float, str]]) -> Any:
    """Draws a bar with quartiles for each name, group with a common colour, length, and text behind the bar."""
    axes = new_axes(0.34 * max(1, len(bars)) + 0.3, title, subtitle, x_axis=x_axis, is_empty=not bars)
    colors = colors_of(group for _, group, _, _ in bars)
    spreads = [value if isinstance(value, Spread) else Spread.of([value]) for _, _, value, _ in bars]
    longest = max((spread.third_quartile for spread in spreads), default=0) or 1.0
    axes.set(xlim=(0, longest * 1.03), ylim=(max(1, len(bars)) - 0.5, -0.5))
    axes.set_yticks(range(len(bars)), [shorten(name, 4.0) for name, *_ in bars])
    for row, ((_, group, _, text), spread) in enumerate(zip(bars, spreads, strict=True)):
        axes.barh(row, spread.median, height=0.6, color=colors[group])
        axes.plot((spread.first_quartile, spread.third_quartile), (row, row), color=INK, linewidth=1.2)
        axes.text(longest * 1.04, row, shorten(text, 6.0), va="center", fontsize=9)
    return axes.figure
