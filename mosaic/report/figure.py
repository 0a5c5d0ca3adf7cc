"""Panels, colours, legends and files of all pictures; matplotlib without pyplot.

The hues are from the colour-blind-safe palettes of Okabe and Ito and of Paul Tol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from mosaic.artifact import write_bytes
from mosaic.errors import MosaicError

INK, FAINT, GRID, OUTSIDE, GLUE = "#1c1c1c", "#6a6a6a", "#dcdcdc", "#efefef", "#a8a8a8"
"""Colours of text, secondary text, lane borders, time outside steps, and operations between modules."""
SHADES = {"darker: forward, lighter: backward": "", "idle": "#ffffff"}
"""Legend of phases."""
WIDTH = 10.0
"""Width of a page in inches."""
_HUES = (
    *("#0072b2", "#e69f00", "#009e73", "#cc6fa4", "#56b4e9", "#d55e00"),
    *("#332288", "#117733", "#882255", "#bfa93a", "#7a5230", "#999933"),
)
_LETTER = 0.075
"""Average width of a letter at 10 points, in inches."""
_STYLE = {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left", "legend.frameon"), False),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color"), FAINT),
    **{"font.size": 9.5, "axes.labelsize": 9.5},
    **{"figure.dpi": 200, "svg.hashsalt": "mosaic", "text.parse_math": False, "axes.axisbelow": True},
    **{"ytick.major.size": 0, "legend.handlelength": 1.6, "legend.columnspacing": 1.4},
}


def _style() -> Any:
    """Returns a context with the common style; raises MosaicError if matplotlib is not installed."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MosaicError(
            f"drawing needs matplotlib, which cannot be imported ({error}); run: pip install 'mosaic-colocate[plot]'"
        ) from error
    return matplotlib.rc_context(_STYLE)


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour ``#rrggbb`` per name, in order of first appearance; twelve colours repeat."""
    return {name: _HUES[index % len(_HUES)] for index, name in enumerate(dict.fromkeys(names))}


def lighter(color: str, share: float = 0.58) -> str:
    """Mixes ``color`` with a ``share`` of white."""
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in bytes.fromhex(color[1:]))


def ink_on(color: str) -> str:
    """Returns black or white, whichever has more contrast on ``color``."""
    red, green, blue = ((part / 255) ** 2.2 for part in bytes.fromhex(color[1:]))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.22 else INK


def new_figure(
    heights: Sequence[float], *, title: str, subtitle: str = "", width: float = WIDTH, legend: Mapping[str, str] = {}
) -> Any:
    """Returns a ``matplotlib.figure.Figure`` with panels of ``heights`` inches, from the top.

    ``legend`` maps texts at the bottom of the page to colours; an empty colour has no swatch.
    """
    texts = [shorten(meaning, 5.0) for meaning in legend]
    columns = max(1, min(len(texts), int(width / (max(map(len, texts), default=1) * _LETTER + 0.5))))
    height = sum(heights) + 0.5 * len(heights) + 0.95 + 0.25 * -(-len(texts) // columns)
    with _style():
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        figure: Any = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.08, w_pad=0.1)
        head = shorten(title, width * 0.75) + "\n" * bool(subtitle)
        figure.suptitle(head, x=0.02, ha="left", fontsize=13, fontweight="bold")
        below = figure.text(0.02, 1 - 0.36 / height, shorten(subtitle, 1.1 * width), color=FAINT, va="top")
        below.set_in_layout(False)
        figure.subplots(len(heights), 1, height_ratios=heights)
        if legend:
            swatches = [Patch(fc=color or "none", ec=FAINT if color else "none") for color in legend.values()]
            figure.legend(swatches, texts, loc="outside lower left", ncols=columns)
    return figure


def shorten(text: str, inches: float) -> str:
    """Returns ``text``, truncated with an ellipsis if it is too long."""
    max_letters = max(1, int(inches / _LETTER))
    return text if len(text) <= max_letters else text[: max_letters - 1] + "…"


def _fitting(texts: Sequence[str], inches: float) -> str:
    """Returns the first of ``texts`` that fits at 10 points; empty if none does."""
    return next((text for text in texts if len(text) * _LETTER + 0.06 <= inches), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A box on a panel's lanes, with its module's name or last name component if it fits."""

    start_ms: float
    end_ms: float
    low: float
    """Upper edge, in lanes from the top."""
    height: float
    """In lanes."""
    color: str
    edge: str
    label: str = ""
    gid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lanes over time, under a title."""

    title: str
    lanes: Sequence[str]
    """Names of the lanes."""
    spans: Sequence[tuple[float, float, Sequence[str]]]
    """Start and end of each interval on white, and texts above it, of which the first that fits is shown."""
    bars: Sequence[Bar]


def lane_figure(
    panels: Sequence[Panel], *, title: str, subtitle: str = "", legend: Mapping[str, str], axis: str, lane_inches: float
) -> Any:
    """Returns a figure of stacked panels with a common time axis in milliseconds."""
    heights = [max(0.84, min(lane_inches * len(panel.lanes), 4.5)) for panel in panels]
    figure = new_figure(heights, title=title, subtitle=subtitle, legend=legend)
    end_ms = max((end for panel in panels for _, end, _ in panel.spans), default=0.0) or 1.0
    ms_inches = 0.88 * WIDTH / end_ms
    for axes, panel, height in zip(figure.axes, panels, heights, strict=True):
        count = max(1, len(panel.lanes))
        axes.set(xlim=(0, end_ms * 1.01), ylim=(count, 0), facecolor=OUTSIDE)
        every = -(-count // 16)
        axes.set_yticks([lane + 0.5 for lane in range(0, len(panel.lanes), every)], panel.lanes[::every])
        axes.tick_params(axis="x", labelbottom=axes is figure.axes[-1])
        pad = 18 if any(texts for *_, texts in panel.spans) else 6
        axes.set_title(shorten(panel.title, WIDTH - 1), loc="left", fontsize=10.5, pad=pad)
        axes.hlines(range(1, count), 0, end_ms * 1.01, color=GRID, linewidth=0.6, zorder=0.3)
        for start, end, texts in panel.spans:
            axes.axvspan(start, end, facecolor="white", edgecolor=GRID, zorder=0.2)
            if text := _fitting(texts, (end - start) * ms_inches):
                at = {"x": (start + end) / 2, "y": 1.01, "transform": axes.get_xaxis_transform()}
                axes.text(s=text, ha="center", va="bottom", fontsize=9, color=FAINT, **at)
        for bar in panel.bars:
            _draw_bar(axes, bar, ms_inches=ms_inches, lane_inches=height / count)
    figure.axes[-1].set_xlabel(axis)
    return figure


def _draw_bar(axes: Any, bar: Bar, *, ms_inches: float, lane_inches: float) -> None:
    from matplotlib.patches import Rectangle

    width = bar.end_ms - bar.start_ms
    style: dict[str, Any] = {"facecolor": bar.color, "edgecolor": bar.edge, "linewidth": 0.5, "gid": bar.gid}
    axes.add_patch(Rectangle((bar.start_ms, bar.low), width, bar.height, zorder=2, **style))
    text = _fitting((bar.label, bar.label.rpartition(".")[2]), width * ms_inches)
    if text and bar.height * lane_inches > 0.13:
        place = (bar.start_ms + width / 2, bar.low + bar.height / 2)
        axes.text(*place, text, ha="center", va="center", clip_on=True, zorder=4, color=ink_on(bar.color))


def picture_format(path: Path) -> str:
    """Returns ``png`` or ``svg`` by the suffix; raises ValueError for others, MosaicError without matplotlib."""
    kind, _ = path.suffix.lower()[1:], _style()
    if kind not in ("png", "svg"):
        raise ValueError(f"{path.name!r} ends in {path.suffix!r}; use .png or .svg")
    return kind


def save_figure(figure: Any, path: Path) -> None:
    """Writes the page atomically and reproducibly, as PNG or SVG by the suffix.

    Raises:
        MosaicError: The folder cannot be written or the disk is full.
        ValueError: The suffix is not ``.png`` or ``.svg``.
    """
    kind, content = picture_format(path), BytesIO()
    with _style():
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else {})
    write_bytes(content.getvalue(), path)
