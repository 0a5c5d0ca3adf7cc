"""Panels, colours, legends and files that all pictures share; plain matplotlib without pyplot.

A module has one colour in all pictures and in the terminal. The hues are from the colour-blind safe sets of Okabe and
Ito and of Paul Tol, ordered so that the first few also differ in lightness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any

from mosaic.artifact import write_bytes
from mosaic.errors import MosaicError

INK, FAINT, GRID, OUTSIDE, GLUE = "#1c1c1c", "#6a6a6a", "#dcdcdc", "#efefef", "#a8a8a8"
"""Text; secondary text; lines between lanes; time outside of steps; operations between modules."""
SHADES = {"darker: forward, lighter: backward": "", "idle": "#ffffff"}
"""Legend of phases."""
WIDTH = 10.0
"""Inches of a page."""
_HUES = (
    *("#0072b2", "#e69f00", "#009e73", "#cc6fa4", "#56b4e9", "#d55e00"),
    *("#332288", "#117733", "#882255", "#bfa93a", "#7a5230", "#999933"),
)
_LETTER = 0.075
"""Inches of an average letter at 10 points."""


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour ``#rrggbb`` for each name by order of first appearance; after twelve they repeat."""
    return {name: _HUES[index % len(_HUES)] for index, name in enumerate(dict.fromkeys(names))}


def lighter(color: str, share: float = 0.58) -> str:
    """Returns ``color`` mixed with ``share`` of white."""
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in bytes.fromhex(color[1:]))


def ink_on(color: str) -> str:
    """Returns the text colour, black or white, that is easier to read on ``color``."""
    red, green, blue = ((part / 255) ** 2.2 for part in bytes.fromhex(color[1:]))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.22 else INK


def new_figure(
    heights: Sequence[float], *, title: str, subtitle: str = "", width: float = WIDTH, legend: Mapping[str, str] = {}
) -> Any:
    """Returns a ``matplotlib.figure.Figure`` with a panel for each of ``heights`` inches, under a title.

    Args:
        heights: Heights of the panels, from the top.
        title: First line, in bold.
        subtitle: Second line, of up to two lines.
        width: Width of the page in inches.
        legend: Meanings at the bottom of the page with their colours; an empty colour has no swatch.

    Raises:
        MosaicError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise MosaicError(
            f"drawing needs matplotlib, which cannot be imported ({error}); run: pip install 'mosaic-colocate[plot]'"
        ) from error
    lines = wrap(subtitle, int(1.1 * width / _LETTER), max_lines=2, placeholder=" …")
    longest = max((min(len(meaning) * _LETTER, 5.0) for meaning in legend), default=1.0) + 0.5
    columns = max(1, min(len(legend), int((width - 0.5) / longest)))
    height = sum(heights) + 0.5 * len(heights) + 0.95 + 0.25 * -(-len(legend) // columns) + 0.2 * max(0, len(lines) - 1)
    figure: Any = Figure(figsize=(width, height), dpi=200, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.1)
    text = shorten(title, width * 0.75) + "\n" * len(lines)
    figure.suptitle(text, x=0.02, ha="left", fontsize=13, fontweight="bold", color=INK, parse_math=False)
    style = {"fontsize": 9.5, "color": FAINT, "va": "top", "parse_math": False}
    figure.text(0.02, 1 - 0.36 / height, "\n".join(lines), **style).set_in_layout(False)
    panels = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": [*heights]})
    for axes in panels[:, 0]:
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(colors=INK, color=FAINT, labelsize=9.5, length=3)
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)
    if legend:
        edges = {"": "none", "#ffffff": FAINT}
        swatches = [
            Patch(facecolor=color or "none", edgecolor=edges.get(color) or _darker(color)) for color in legend.values()
        ]
        box = figure.legend(
            swatches, [" "] * len(legend), loc="outside lower left", ncols=columns, frameon=False, fontsize=9.5,
            handlelength=1.6, columnspacing=1.4,
        )  # fmt: skip
        for entry, meaning in zip(box.get_texts(), legend, strict=True):
            entry.set_parse_math(False)
            entry.set_text(shorten(meaning, 5.0))
    return figure


def set_head(axes: Any, name: str, fact: str, *, pad: float = 6) -> None:
    """Writes a panel's name and a fact about it above the panel."""
    text = shorten(f"{shorten(name, 4.0)}:  {fact}", WIDTH - 1)
    axes.set_title(text, loc="left", fontsize=10.5, color=INK, parse_math=False, pad=pad)


def shorten(text: str, inches: float) -> str:
    """Returns ``text``, or its first letters and an ellipsis if it is too long for the room."""
    most = max(1, int(inches / _LETTER))
    return text if len(text) <= most else text[: most - 1] + "…"


def fitting(texts: Sequence[str], inches: float) -> str:
    """Returns the first of ``texts`` that fits the room at 10 points; empty if none does."""
    return next((text for text in texts if len(text) * _LETTER + 0.06 <= inches), "")


def add_bar(
    axes: Any, left: float, low: float, width: float, height: float, color: str, *, label: str = "", **style: Any
) -> None:
    """Adds a rectangle in data units, edged in a darker shade, with a module's name or its last parts if they fit.

    The label needs the axes' limits.
    """
    from matplotlib.patches import Rectangle

    style = {"facecolor": color, "edgecolor": _darker(color), "linewidth": 0.5, "zorder": 2, **style}
    axes.add_patch(Rectangle((left, low), width, height, **style))
    if not label:
        return
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    position, (page_width, page_height) = axes.get_position(), axes.figure.get_size_inches()
    if height / abs(y1 - y0) * position.height * page_height <= 0.13:
        return
    parts = label.split(".")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    text = fitting(tails, width / abs(x1 - x0) * position.width * page_width)
    center = {"ha": "center", "va": "center", "clip_on": True, "parse_math": False, "fontsize": 9.5, "zorder": 4}
    if text:
        axes.text(left + width / 2, low + height / 2, text, color=ink_on(color), **center)


def _darker(color: str, share: float = 0.35) -> str:
    return "#" + "".join(f"{round(part * (1 - share)):02x}" for part in bytes.fromhex(color[1:]))


def save_figure(figure: Any, path: Path) -> None:
    """Writes the page whole or not at all, as PNG or SVG by the suffix; the same input gives the same bytes.

    Raises:
        MosaicError: The folder cannot be written or the disk is full.
        ValueError: The suffix is neither.
    """
    import matplotlib

    kind = path.suffix.lower()[1:]
    if kind not in ("png", "svg"):
        raise ValueError(f"picture {path.name!r} ends in {path.suffix!r}; use .png or .svg")
    content = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mosaic"}):
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else {})
    write_bytes(content.getvalue(), path)
