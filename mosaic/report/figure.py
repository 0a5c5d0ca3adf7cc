"""Panels, legends and files that all pictures share; plain matplotlib without pyplot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any

from mosaic.artifact import write_bytes
from mosaic.errors import MosaicError
from mosaic.report.palette import FAINT, INK, darker, ink_on

WIDTH = 10.0
"""Inches of a page."""
_LETTER = 0.075
"""Inches of an average letter at 10 points."""


def check_path(path: Path) -> None:
    """Raises ValueError unless ``path`` has the suffix of a supported picture format."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"picture {path.name!r} ends in {path.suffix!r}; use .png or .svg")


def new_figure(heights: Sequence[float], *, title: str, subtitle: str = "", width: float = WIDTH, rows: int = 0) -> Any:
    """Returns a ``matplotlib.figure.Figure`` with a panel for each of ``heights`` inches, under a title.

    Args:
        heights: Heights of the panels, from the top.
        title: First line, in bold.
        subtitle: Second line.
        width: Width of the page in inches.
        rows: Lines of a legend, for which the page has room at the bottom.

    Raises:
        MosaicError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MosaicError(
            f"drawing needs matplotlib, which cannot be imported ({error}); run: pip install 'mosaic-colocate[plot]'"
        ) from error
    lines = wrap(subtitle, int(1.1 * width / _LETTER), max_lines=2, placeholder=" …")
    height = sum(heights) + 0.5 * len(heights) + 0.95 + 0.25 * rows + 0.2 * max(0, len(lines) - 1)
    figure: Any = Figure(figsize=(width, height), dpi=200, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.1)
    text = shorten(title, width * 0.75) + "\n" * len(lines)
    figure.suptitle(text, x=0.02, ha="left", fontsize=13, fontweight="bold", color=INK, parse_math=False)
    if lines:
        at = 1 - 0.36 / height
        below = figure.text(0.02, at, "\n".join(lines), fontsize=9.5, color=FAINT, va="top", parse_math=False)
        below.set_in_layout(False)
    panels = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": [*heights]})
    for axes in panels[:, 0]:
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(colors=INK, color=FAINT, labelsize=9.5, length=3)
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)
    return figure


def set_head(axes: Any, name: str, fact: str, *, pad: float = 6) -> None:
    """Writes a panel's name and a fact about it above the panel."""
    text = f"{shorten(name, 4.0)}:  {fact}"
    axes.set_title(shorten(text, WIDTH - 1), loc="left", fontsize=10.5, color=INK, parse_math=False, pad=pad)


def shorten(text: str, inches: float) -> str:
    """Returns ``text``, or its first letters and an ellipsis if it is too long for the room."""
    most = max(1, int(inches / _LETTER))
    return text if len(text) <= most else text[: most - 1] + "…"


def fits(text: str, inches: float) -> bool:
    """Returns True if there is room for ``text`` of 10 points."""
    return len(text) * _LETTER + 0.06 <= inches


def add_bar(axes: Any, left: float, low: float, width: float, height: float, color: str, **style: Any) -> None:
    """Adds a rectangle in data units, edged in a darker shade of its colour."""
    from matplotlib.patches import Rectangle

    style = {"facecolor": color, "edgecolor": darker(color), "linewidth": 0.5, "zorder": 2, **style}
    axes.add_patch(Rectangle((left, low), width, height, **style))


def add_label(axes: Any, left: float, low: float, width: float, height: float, name: str, color: str) -> None:
    """Writes a module's name, or its last parts, into its bar if there is room; needs the axes' limits."""
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    position, (page_width, page_height) = axes.get_position(), axes.figure.get_size_inches()
    room = width / abs(x1 - x0) * position.width * page_width
    is_high = height / abs(y1 - y0) * position.height * page_height > 0.13
    parts = name.split(".")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    shown = next((tail for tail in tails if fits(tail, room)), "")
    if shown and is_high:
        middle = (left + width / 2, low + height / 2)
        style = {"ha": "center", "va": "center", "clip_on": True, "parse_math": False}
        axes.text(*middle, shown, fontsize=9.5, color=ink_on(color), zorder=4, **style)


def legend_rows(entries: Mapping[str, str]) -> int:
    """Returns the rows that ``add_legend`` needs."""
    return -(-len(entries) // _legend_columns(entries))


def add_legend(figure: Any, entries: Mapping[str, str]) -> None:
    """Adds swatches with their meanings at the bottom of the page; an empty colour has no swatch."""
    from matplotlib.patches import Patch

    edges = {"": "none", "#ffffff": FAINT}
    handles = [
        Patch(facecolor=color or "none", edgecolor=edges.get(color) or darker(color)) for color in entries.values()
    ]
    legend = figure.legend(
        handles, [" "] * len(handles), loc="outside lower left", ncols=_legend_columns(entries), frameon=False,
        fontsize=9.5, handlelength=1.6, columnspacing=1.4,
    )  # fmt: skip
    for text, meaning in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)
        text.set_text(shorten(meaning, 5.0))


def _legend_columns(entries: Mapping[str, str]) -> int:
    longest = max((min(len(meaning) * _LETTER, 5.0) for meaning in entries), default=1.0) + 0.5
    return max(1, min(len(entries), int((WIDTH - 0.5) / longest)))


def save_figure(figure: Any, path: Path) -> None:
    """Writes the page whole or not at all, as PNG or SVG by the suffix; the same input gives the same bytes.

    Raises:
        MosaicError: The folder cannot be written or the disk is full.
        ValueError: The suffix is neither.
    """
    import matplotlib

    check_path(path)
    content, kind = BytesIO(), path.suffix.lower()[1:]
    with matplotlib.rc_context({"svg.hashsalt": "mosaic"}):
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else {})
    write_bytes(content.getvalue(), path)
