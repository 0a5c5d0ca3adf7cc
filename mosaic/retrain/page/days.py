"""The last thirty days: a square each, and the champion's score on each day's held-out rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from mosaic.retrain.page.markup import Markup, brief, element, join, section
from mosaic.retrain.page.wording import figure
from mosaic.retrain.records import DaySquare, Outcome

MAX_DAYS = 30
_LETTERS: dict[Outcome, str] = {
    "promoted": "P",
    "held": "H",
    "refused": "R",
    "quarantined": "Q",
    "failed": "F",
    "interrupted": "N",
}
_WORDS: dict[Outcome, str] = {
    "promoted": "promoted",
    "held": "held by a person",
    "refused": "refused by the gate",
    "quarantined": "data quarantined",
    "failed": "failed",
    "interrupted": "not finished",
}
_HEIGHT = 96
_TOP, _BOTTOM = 12.0, 84.0


def days(history: Sequence[DaySquare]) -> Markup:
    """The section of earlier days and today."""
    shown = history[-MAX_DAYS:]
    if not shown:
        return section("days", "Days", element("p", "This is the first day.", class_="faint"))
    heading = "Thirty days" if len(shown) == MAX_DAYS else "Days so far"
    squares = element("ol", *(_square(day) for day in shown), class_="days")
    ends = element("p", *(element("span", brief(day.day)) for day in (shown[0], shown[-1])), class_="ends faint")
    return section("days", heading, squares, ends if len(shown) > 1 else None, _key(shown), _fresh(shown))


def _square(day: DaySquare) -> Markup:
    text = f"{brief(day.day)}: {_WORDS[day.outcome] if day.outcome else 'no run'}"
    text += "" if day.fresh is None else f", fresh {figure(day.fresh)}"
    return element(
        "li",
        element("span", _LETTERS[day.outcome] if day.outcome else "·", aria_hidden="true"),
        element("span", text, class_="unseen"),
        class_=day.outcome or "none",
        title=text,
    )


def _key(shown: Sequence[DaySquare]) -> Markup:
    outcomes = {day.outcome for day in shown}
    items = [
        element("span", element("b", letter, class_=outcome), " ", _WORDS[outcome])
        for outcome, letter in _LETTERS.items()
        if outcome in outcomes
    ]
    return element("p", *items, class_="key faint", aria_hidden="true")


def _fresh(shown: Sequence[DaySquare]) -> Markup | None:
    points = [
        (place, day.fresh) for place, day in enumerate(shown) if day.fresh is not None and math.isfinite(day.fresh)
    ]
    if len(points) < 2:
        return None
    low, high = min(value for _, value in points), max(value for _, value in points)
    last = points[-1][1]
    title = "Champion's score on each day's fresh rows"
    text = f"{title}: last {figure(last)}, lowest {figure(low)}, highest {figure(high)}, {len(points)} days measured."
    return element(
        "figure",
        element("figcaption", f"{title}: ", element("b", figure(last)), f" ({figure(low)} to {figure(high)})"),
        element("div", _line(shown, points, low, high), class_="chart"),
        aria_label=text,
    )


def _line(shown: Sequence[DaySquare], points: Sequence[tuple[int, float]], low: float, high: float) -> Markup:
    """Segments between consecutive days; a day without a score leaves a gap."""

    def x(place: int) -> str:
        return f"{100 * (place + 0.5) / len(shown):.4g}%"

    def y(value: float) -> str:
        return f"{_BOTTOM - (_BOTTOM - _TOP) * ((value - low) / (high - low) if high > low else 0.5):.4g}"

    segments = [
        element("line", x1=x(first), y1=y(old), x2=x(second), y2=y(new))
        for (first, old), (second, new) in pairwise(points)
        if second == first + 1
    ]
    dots = [element("circle", cx=x(place), cy=y(value), r=2) for place, value in points]
    place, value = points[-1]
    return element(
        "svg", join(segments), join(dots), element("circle", cx=x(place), cy=y(value), r=4.5), height=_HEIGHT,
        aria_hidden="true",
    )  # fmt: skip
