"""One colour for each module, the same in pictures and in the terminal.

The hues are from the colour-blind safe sets of Okabe and Ito and of Paul Tol, ordered so that the first few also differ
in lightness. A module's backward has its colour mixed with white; grey is kept for glue.
"""

from __future__ import annotations

from collections.abc import Iterable

INK, FAINT, GRID, OUTSIDE, GLUE = "#1c1c1c", "#6a6a6a", "#dcdcdc", "#efefef", "#a8a8a8"
"""Text; secondary text; lines between lanes; time outside of steps; operations between modules."""
_HUES = (
    *("#0072b2", "#e69f00", "#009e73", "#cc6fa4", "#56b4e9", "#d55e00"),
    *("#332288", "#117733", "#882255", "#bfa93a", "#7a5230", "#999933"),
)


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour ``#rrggbb`` for each name by order of first appearance; after twelve they repeat."""
    return {name: _HUES[index % len(_HUES)] for index, name in enumerate(dict.fromkeys(names))}


def lighter(color: str, share: float = 0.58) -> str:
    """Returns ``color`` mixed with ``share`` of white."""
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in bytes.fromhex(color[1:]))


def darker(color: str, share: float = 0.35) -> str:
    """Returns ``color`` mixed with ``share`` of black."""
    return "#" + "".join(f"{round(part * (1 - share)):02x}" for part in bytes.fromhex(color[1:]))


def ink_on(color: str) -> str:
    """Returns the text colour, black or white, that is easier to read on ``color``."""
    red, green, blue = ((part / 255) ** 2.2 for part in bytes.fromhex(color[1:]))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.22 else INK
