"""Pictures of cost models: scaling surfaces with their samples, and predicted against measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosaic.report.canvas import Canvas, check_path
from mosaic.report.charts import Words
from mosaic.report.palette import FAINT, GRID, INK, colors_of

_LEFT, _HEAD, _FOOT = 0.75, 1.0, 0.7
_PANEL = (2.2, 1.75)
_MOST_COLUMNS = 4
_GAP = (0.75, 0.85)
_MARKERS = ("o", "s", "D", "^")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfaceLine:
    """One degree of one surface."""

    name: str
    """For the legend, such as ``2 devices``."""
    fitted: tuple[Point, ...]
    """Quota in slots and milliseconds, as the surface has it."""
    samples: tuple[Point, ...] = ()
    """What was fitted."""
    held_out: tuple[Point, ...] = ()
    """What was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfacePanel:
    """One phase of one module."""

    title: str
    """Above it."""
    lines: tuple[SurfaceLine, ...]
    """By rising degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Predicted times beside measured ones, of one model."""

    name: str
    """For the legend."""
    pairs: tuple[Point, ...]
    """Measured and predicted milliseconds, both positive."""


def draw_surfaces(panels: Sequence[SurfacePanel], words: Words, path: Path) -> None:
    """Writes a small picture a module, both axes logarithmic, as .png or .svg.

    Samples that were fitted are full dots, those held out are rings.
    """
    check_path(path)
    columns = min(_MOST_COLUMNS, max(1, len(panels)))
    rows = -(-max(1, len(panels)) // columns)
    width = _LEFT + columns * (_PANEL[0] + _GAP[0])
    canvas = Canvas(width=max(9.0, width), height=_HEAD + 0.3 + rows * (_PANEL[1] + _GAP[1]))
    colors = colors_of(line.name for panel in panels for line in panel.lines)
    _head(canvas, words, colors)
    for index, panel in enumerate(panels):
        left = _LEFT + index % columns * (_PANEL[0] + _GAP[0])
        top = _HEAD + 0.3 + index // columns * (_PANEL[1] + _GAP[1])
        canvas.text(left, top - 0.08, f"{panel.title}, {words.y_axis}", size=9.5)
        axes = canvas.panel(left, top, *_PANEL)
        _logarithmic(axes)
        for line in panel.lines:
            color = colors[line.name]
            axes.plot(*_columns(line.fitted), color=color, linewidth=1.3)
            axes.plot(*_columns(line.samples), color=color, marker="o", markersize=3.5, linestyle="none")
            rings = {"marker": "o", "markersize": 4.5, "markerfacecolor": "none", "linestyle": "none"}
            axes.plot(*_columns(line.held_out), color=color, **rings)
        axes.set_xlabel(words.x_axis, color=INK, fontsize=8.5)
    canvas.save(path)


def draw_predictions(models: Sequence[Predictions], words: Words, path: Path) -> None:
    """Writes predicted over measured times, and beside it what they are off by, as .png or .svg.

    ``words.x_axis`` says what the true times are: measured or simulated.
    """
    check_path(path)
    canvas = Canvas(width=10.6, height=_HEAD + 4.0 + _FOOT)
    colors = colors_of(model.name for model in models)
    _head(canvas, words, colors)
    left = canvas.panel(_LEFT, _HEAD + 0.3, 4.2, 3.7)
    right = canvas.panel(_LEFT + 5.3, _HEAD + 0.3, 4.2, 3.7)
    canvas.text(_LEFT, _HEAD + 0.18, words.y_axis, size=9.5)
    canvas.text(_LEFT + 5.3, _HEAD + 0.18, "residual: the same over the true time, less one", size=9.5)
    pairs = [pair for model in models for pair in model.pairs]
    if pairs:
        _logarithmic(left)
        right.grid(color=GRID, linewidth=0.6)
        _logarithmic(right, "x")
        ends = (0.8 * min(min(pair) for pair in pairs), 1.25 * max(max(pair) for pair in pairs))
        left.plot(ends, ends, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)))
        right.axhline(0, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)))
    for index, model in enumerate(models):  # hollow and of unequal shape, since models often agree
        shape = {"marker": _MARKERS[index % len(_MARKERS)], "markersize": 5, "markerfacecolor": "none"}
        dots = {"color": colors[model.name], "linestyle": "none", **shape}
        left.plot(*_columns(model.pairs), **dots)
        right.plot(*_columns([(seen, told / seen - 1) for seen, told in model.pairs]), **dots)
    for axes in (left, right):
        axes.set_xlabel(words.x_axis, color=INK, fontsize=9.5)
        if not pairs:
            axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center", color=FAINT)
    canvas.save(path)


def _logarithmic(axes: Any, which: str = "xy") -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.grid(color=GRID, linewidth=0.6)
    for name in which:
        getattr(axes, f"set_{name}scale")("log", base=2)
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axis.set_minor_formatter(NullFormatter())


def _head(canvas: Canvas, words: Words, colors: dict[str, str]) -> None:
    canvas.text(0.2, 0.34, words.title, size=12.5, fontweight="bold")
    canvas.text(0.2, 0.58, words.subtitle, size=9, color=FAINT)
    axes = canvas.panel(0, 0, canvas.width, canvas.height)
    axes.set_axis_off()
    axes.set(xlim=(0, canvas.width), ylim=(canvas.height, 0), zorder=-1)
    left = 0.2
    for name, color in colors.items():
        canvas.bar(axes, (left, 0.72, 0.24, 0.12), color)
        left = canvas.text(left + 0.32, 0.84, name, size=9) + 0.3


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
