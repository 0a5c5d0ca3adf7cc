"""The page's colours, by name, for light and dark; hues are those of Mosaic's pictures."""

from __future__ import annotations

from mosaic.report.palette import darker, lighter
from mosaic.retrain.records import Outcome

HUES: dict[Outcome, str] = {
    "promoted": "#009e73",
    "held": "#0072b2",
    "refused": "#d55e00",
    "quarantined": "#882255",
    "failed": "#b3261e",
    "interrupted": "#7a5230",
}
"""Each outcome's; a letter, a word or a sign says the same beside it."""

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f6f6f4",
    "ink": "#1c1c1c",
    "faint": "#5c5c5c",
    "line": "#dcdcdc",
    "wash": "#efeeea",
    "mark": "#3b5b85",
    "bad": "#a8201a",
    "bad-wash": "#fbe3df",
}
DARK = {
    "paper": "#16181b",
    "panel": "#1f2226",
    "ink": "#e8e6e3",
    "faint": "#a3a6ab",
    "line": "#34383e",
    "wash": "#24272c",
    "mark": "#9dbce6",
    "bad": "#ff9b8a",
    "bad-wash": "#43211f",
}

CALM: frozenset[Outcome] = frozenset(("promoted", "held", "interrupted"))
"""Outcomes whose square is pale: nobody has to look."""


def variables(*, dark: bool) -> dict[str, str]:
    """Returns every colour of one scheme by the name that the style sheet knows it by."""
    colors = dict(DARK if dark else LIGHT)
    for outcome, hue in HUES.items():
        ink, pale = (lighter(hue, 0.55), darker(hue, 0.6)) if dark else (darker(hue), lighter(hue, 0.8))
        full = (lighter(hue, 0.5), darker(hue, 0.85)) if dark else (darker(hue, 0.2), "#ffffff")
        colors[outcome] = ink
        colors[f"{outcome}-square"], colors[f"{outcome}-letter"] = (pale, ink) if outcome in CALM else full
    return colors
