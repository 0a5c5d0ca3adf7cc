"""A matplotlib figure laid out in inches, without pyplot and independent of the user's backend."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from mosaic.artifact import write_bytes
from mosaic.errors import MosaicError
from mosaic.report.palette import FAINT, GLUE, INK, OUTSIDE, darker, ink_on, lighter

DPI = 200
_FORMATS = (".png", ".svg")
_TEXT_SIZE = 10.0
_MIN_TEXT_SIZE = 6.5
_ELLIPSIS = "…"


def check_path(path: Path) -> None:
    """Raises ValueError unless ``path`` has the suffix of a supported picture format."""
    if path.suffix.lower() not in _FORMATS:
        raise ValueError(f"picture {path.name!r} ends in {path.suffix!r}; use {' or '.join(_FORMATS)}")


def load_matplotlib() -> Any:
    """Returns the ``matplotlib`` package with the needed modules imported.

    Raises:
        MosaicError: It is not installed.
    """
    try:
        import matplotlib
        import matplotlib.backends.backend_agg
        import matplotlib.figure
        import matplotlib.font_manager
        import matplotlib.patches
    except ImportError as error:
        raise MosaicError(
            f"drawing needs matplotlib, which cannot be imported ({error}); run: pip install 'mosaic-colocate[plot]'"
        ) from error
    return matplotlib


@dataclass(kw_only=True)
class Canvas:
    """A white page measured in inches from its top left corner.

    Attributes:
        width: Width in inches.
        height: Height in inches.
        figure: The ``matplotlib.figure.Figure``, with an Agg canvas of its own.
    """

    width: float
    height: float
    figure: Any = field(init=False)
    _mpl: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._mpl = load_matplotlib()
        self.figure = self._mpl.figure.Figure(figsize=(self.width, self.height), dpi=DPI, facecolor="white")
        self._mpl.backends.backend_agg.FigureCanvasAgg(self.figure)

    def panel(self, left: float, top: float, width: float, height: float) -> Any:
        """Adds axes whose upper left corner is at (``left``, ``top``), in inches."""
        bottom = self.height - top - height
        axes = self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=_TEXT_SIZE - 0.5, length=3, color=FAINT)
        axes.set_axisbelow(True)
        return axes

    def text(self, left: float, baseline: float, text: str, *, size: float = _TEXT_SIZE, **style: Any) -> float:
        """Writes ``text``, cut at the page's edge, and returns its end in inches from the left.

        Its baseline lies ``baseline`` inches below the top. Math mode is off.
        """
        weight = style.get("fontweight", "normal")
        shown = self.shorten(text, self.width - left - 0.1, size, weight)
        style = {"fontsize": size, "color": INK, "va": "baseline", "parse_math": False, **style}
        self.figure.text(left / self.width, 1 - baseline / self.height, shown, **style)
        return left + self.measure(shown, size, weight)

    def shorten(self, text: str, room: float, size: float = _TEXT_SIZE, weight: str = "normal") -> str:
        """Returns ``text``, or as many of its first letters and an ellipsis as ``room`` inches hold."""
        if self.measure(text, size, weight) <= room:
            return text
        fitting = bisect_right(range(len(text)), room, key=lambda n: self.measure(text[:n] + _ELLIPSIS, size, weight))
        return text[: fitting - 1] + _ELLIPSIS if fitting > 1 else ""

    def measure(self, text: str, size: float = _TEXT_SIZE, weight: str = "normal") -> float:
        """Returns the width of ``text`` in inches."""
        font = self._mpl.font_manager.FontProperties(size=size, weight=weight)
        width, _, _ = self.figure.canvas.get_renderer().get_text_width_height_descent(text, font, False)
        return float(width) / DPI

    def fit(self, name: str, room: float, size: float = _TEXT_SIZE) -> str:
        """Returns the longest end of a qualified name that fits ``room`` inches; empty if none does.

        ``model.vision.encoder`` becomes ``vision.encoder``, then ``encoder``.
        """
        parts = name.split(".")
        tails = (".".join(parts[start:]) for start in range(len(parts)))
        return next((tail for tail in tails if self.measure(tail, size) <= room), "")

    def bar(self, axes: Any, box: tuple[float, float, float, float], color: str, **style: Any) -> Any:
        """Adds a rectangle (left, low, width, height in data units) edged in a darker shade of its colour."""
        left, low, width, height = box
        style = {"facecolor": color, "edgecolor": darker(color), "linewidth": 0.5, **style}
        return axes.add_patch(self._mpl.patches.Rectangle((left, low), width, height, **style))

    def label(self, axes: Any, box: tuple[float, float, float, float], name: str, color: str) -> None:
        """Writes ``name`` in the middle of a bar, upright in a narrow one, cut in a small one, or not at all."""
        corners = axes.transData.transform([(box[0], box[1]), (box[0] + box[2], box[1] + box[3])])
        wide, high = (abs(corners[1] - corners[0]) / DPI).tolist()
        size = min(_TEXT_SIZE, high * 72 * 0.78)
        upright_size = min(_TEXT_SIZE, wide * 72 * 0.78)
        shown = self.fit(name, wide - 0.06, size) if size >= _MIN_TEXT_SIZE else ""
        upright = self.fit(name, high - 0.06, upright_size) if upright_size >= _MIN_TEXT_SIZE else ""
        if not shown and not upright and size >= _MIN_TEXT_SIZE:
            shown = self.shorten(name.rpartition(".")[2], wide - 0.06, size)
            shown = shown if len(shown) > 4 else ""
        if shown or upright:
            middle = (box[0] + box[2] / 2, box[1] + box[3] / 2)
            axes.text(
                *middle, shown or upright, fontsize=size if shown else upright_size, rotation=0 if shown else 90,
                color=ink_on(color), ha="center", va="center_baseline" if shown else "center",
                clip_on=True, parse_math=False,
            )  # fmt: skip

    def save(self, path: Path) -> None:
        """Writes the page atomically as PNG or SVG by the suffix of ``path``.

        Raises:
            MosaicError: The folder cannot be written or the disk is full.
            ValueError: The suffix is neither.
        """
        check_path(path)
        kind = path.suffix.lower()[1:]
        content = BytesIO()
        # The same input gives the same bytes: no date, and ids that do not depend on the process.
        metadata: Mapping[str, None] = {"Date": None} if kind == "svg" else {}
        with self._mpl.rc_context({"svg.hashsalt": "mosaic"}):
            self.figure.savefig(content, format=kind, dpi=DPI, metadata=metadata)
        write_bytes(content.getvalue(), path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendEntry:
    """A swatch of one or two colours, and its meaning."""

    text: str
    """Meaning of the swatch."""
    colors: tuple[str, ...]
    """One colour, or forward's and backward's."""
    width: float
    """Width in inches."""


def legend_rows(
    colors: Mapping[str, str], *, glue: bool, page_width: float, weights: bool = False
) -> tuple[tuple[LegendEntry, ...], ...]:
    """Breaks a legend of modules and shades into rows of ``page_width`` inches."""
    ruler = Canvas(width=1, height=1)
    meanings: list[tuple[str, tuple[str, ...]]] = [(name, (color, lighter(color))) for name, color in colors.items()]
    meanings.append(("darker: forward, lighter: backward" + (", lightest: for weights" if weights else ""), ()))
    meanings += [("glue", (GLUE,))] if glue else []
    meanings += [("white: idle", ("#ffffff",)), ("outside of steps", (OUTSIDE,))]
    rows: list[list[LegendEntry]] = [[]]
    used = 0.0
    for text, swatch in meanings:
        shown = ruler.shorten(text, page_width * 0.45)
        width = ruler.measure(shown) + (0.36 if swatch else 0.0) + 0.22
        if used + width > page_width and rows[-1]:
            rows.append([])
            used = 0.0
        rows[-1].append(LegendEntry(text=shown, colors=swatch, width=width))
        used += width
    return tuple(tuple(row) for row in rows)


def draw_legend(canvas: Canvas, rows: Sequence[Sequence[LegendEntry]], left: float, top: float) -> None:
    """Draws ``rows`` downwards from (``left``, ``top``), 0.24 inches a row."""
    axes = canvas.panel(0, 0, canvas.width, canvas.height)
    axes.set_axis_off()
    axes.set(xlim=(0, canvas.width), ylim=(canvas.height, 0), zorder=-1)
    for index, row in enumerate(rows):
        x, y = left, top + 0.24 * index
        for entry in row:
            for part, color in enumerate(entry.colors):
                half = 0.28 / len(entry.colors)
                edge = darker(entry.colors[0]) if color != "#ffffff" else FAINT
                canvas.bar(axes, (x + part * half, y, half, 0.14), color, edgecolor=edge)
            shift = 0.36 if entry.colors else 0.0
            canvas.text(x + shift, y + 0.125, entry.text, color=INK if entry.colors else FAINT)
            x += entry.width
