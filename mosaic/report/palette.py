"""One colour for each module, the same in pictures and in the terminal.

The hues are from the colour-blind safe sets of Okabe and Ito and of Paul Tol, ordered so that the first few
also differ in lightness. Backward has the module's colour mixed with white; grey is kept for glue.
"""

from __future__ import annotations

from collections.abc import Iterable

_HUES = (
    "#0072b2",  # blue
    "#e69f00",  # orange
    "#009e73",  # green
    "#cc6fa4",  # pink
    "#56b4e9",  # sky
    "#d55e00",  # vermilion
    "#332288",  # indigo
    "#117733",  # dark green
    "#882255",  # wine
    "#bfa93a",  # sand
    "#7a5230",  # brown
    "#999933",  # olive
)

INK = "#1c1c1c"
"""Text and axes."""
FAINT = "#6a6a6a"
"""Secondary text."""
GRID = "#dcdcdc"
"""Lines between lanes."""
OUTSIDE = "#efefef"
"""Time that no step covers."""
GLUE = "#a8a8a8"
"""Operations between modules."""


def colors_of(modules: Iterable[str]) -> dict[str, str]:
    """Gives each module a colour ``#rrggbb`` by order of first appearance; after twelve they repeat."""
    names = dict.fromkeys(modules)
    return {name: _HUES[index % len(_HUES)] for index, name in enumerate(names)}


def lighter(color: str, share: float = 0.58) -> str:
    """Returns ``color`` mixed with ``share`` of white."""
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in _parts(color))


def darker(color: str, share: float = 0.35) -> str:
    """Returns ``color`` mixed with ``share`` of black."""
    return "#" + "".join(f"{round(part * (1 - share)):02x}" for part in _parts(color))


def ink_on(color: str) -> str:
    """Returns the text colour, black or white, with the higher contrast on ``color`` (WCAG 2 luminance)."""
    linear = [(part / 255 + 0.055) ** 2.4 / 1.055**2.4 if part > 10 else part / 255 / 12.92 for part in _parts(color)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.06 else INK


def _parts(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
