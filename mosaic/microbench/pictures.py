"""Bars, the picture of most questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mosaic.microbench.settings import Spread
from mosaic.report.figure import INK, colors_of, new_figure, shorten


def bars_figure(title: str, subtitle: str, x_axis: str, bars: Sequence[tuple[str, str, Spread | float, str]]) -> Any:
    """Draws a bar with quartiles for each name, group with a common colour, length, and text behind the bar."""
    axes = new_figure([0.34 * max(1, len(bars)) + 0.3], title=title, subtitle=subtitle, width=9.0).axes[0]
    colors = colors_of(group for _, group, _, _ in bars)
    axes.set(ylim=(max(1, len(bars)) - 0.5, -0.5), xlabel=x_axis)
    axes.set_yticks(range(len(bars)), [shorten(name, 4.0) for name, *_ in bars])
    for row, (_, group, value, text) in enumerate(bars):
        spread = value if isinstance(value, Spread) else Spread.of([value])
        axes.barh(row, spread.median, height=0.6, color=colors[group])
        axes.plot((spread.first_quartile, spread.third_quartile), (row, row), color=INK, linewidth=1.2)
        axes.text(1.01, row, shorten(text, 6.0), va="center", transform=axes.get_yaxis_transform())
    return axes.figure
