"""Formats of numbers, times and durations on the page."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from mosaic.retrain.page.markup import brief

MINUS = "\u2212"
NONE = "–"


def decimals_for(step: float) -> int:
    """Returns the decimals that show tenths of ``step``, such as the margin: 3 for 0.01."""
    return min(6, max(0, 1 - math.floor(math.log10(step)))) if 0 < step < math.inf else 3


def number(value: float | None, decimals: int) -> str:
    """Returns ``value`` with a real minus sign."""
    if value is None or not math.isfinite(value):
        return NONE if value is None else "NaN"
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def signed(value: float, decimals: int) -> str:
    """Returns a difference, with its sign."""
    text = number(value, decimals)
    return f"+{text}" if math.isfinite(value) and value > 0 else text


def figure(value: float | None) -> str:
    """Returns a number of unknown size in about three digits."""
    if value is None or not math.isfinite(value):
        return number(value, 0)
    if value == int(value) and abs(value) < 1e12:
        return number(value, 0)
    size = math.floor(math.log10(abs(value)))
    if not -4 <= size < 9:
        return f"{value:.2e}".replace("-", MINUS)
    text = number(value, max(0, 2 - size))
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(amount: int, thing: str) -> str:
    """Returns ``1 row``, ``2,000 rows`` or ``2 processes``."""
    more = "es" if thing.endswith("s") else "s"
    return f"{amount:,} {thing}{'' if amount == 1 else more}"


def moment(iso: str, *, day: str = "") -> str:
    """Formats a UTC time as ``01:00 UTC``, with its date if not of ``day``; returns other text unchanged."""
    when = _parsed(iso)
    if when is None:
        return brief(iso)
    return f"{when:%H:%M} UTC" if f"{when:%Y-%m-%d}" == day else f"{when:%Y-%m-%d %H:%M} UTC"


def date_of(iso: str) -> str:
    """Returns the date of a UTC time; empty for other text."""
    when = _parsed(iso)
    return "" if when is None else f"{when:%Y-%m-%d}"


def duration(began: str, ended: str) -> str:
    """Returns the time between two UTC times as ``2 h 12 min``; empty if either is not a time."""
    first, last = _parsed(began), _parsed(ended)
    if first is None or last is None:
        return ""
    seconds = max(0, round((last - first) / timedelta(seconds=1)))
    hours, minutes = divmod(seconds // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds} s"


def _parsed(iso: str) -> datetime | None:
    try:
        when = datetime.fromisoformat(iso)
    except ValueError:
        return None
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
