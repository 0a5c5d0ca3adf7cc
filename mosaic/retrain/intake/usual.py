"""A day's data in figures, and the usual range of each: the median of earlier days, and their spread about it."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mosaic.retrain.gate.scores import Scores
from mosaic.retrain.records import Usual

MANY_SPREADS = 4.0
"""Robust standard deviations from the median beyond which a figure is remarkable."""
MANY_ERRORS = 3.0
"""Standard errors of today's rows from the median beyond which a figure is remarkable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFigures:
    """The values of one input over a day's rows."""

    mean: float | None
    """Mean of all values; None if it was not finite."""
    spread: float | None
    """Standard deviation of all values; None if it was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayFigures:
    """``figures.json`` of a day: figures of its data."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    """Version of this file's layout."""
    day: str
    """Cut-off of the data."""
    rows: int
    """Readable rows."""
    unreadable: dict[str, int]
    """Unreadable rows, by reason."""
    labels: dict[str, int]
    """Rows by label; empty without labels."""
    modalities: dict[str, int]
    """Rows by modality; a row of several counts in each. Empty without modalities."""
    inputs: dict[str, InputFigures]
    """Figures by input name."""
    champion: float | None
    """The champion's mean value on the day's rows, or on some of them; None without a champion."""
    champion_error: float | None
    """Standard error of that mean, by groups of rows."""


def day_figures(
    day: str,
    scores: Scores,
    *,
    unreadable: Mapping[str, int],
    inputs: Mapping[str, InputFigures],
    is_champion: bool = True,
) -> DayFigures:
    """Returns a day's figures from a version's scores on its rows.

    Args:
        day: Cut-off of the data.
        scores: Scores of all readable rows; ``label`` and ``modality`` are counted, ``image+audio`` as both.
        unreadable: Unreadable rows, by reason.
        inputs: Means and spreads of inputs.
        is_champion: True if the champion scored them; any other model gives only labels and modalities.
    """
    values = scores.array[np.isfinite(scores.array)]
    groups = np.array(scores.cluster or range(len(scores.value)))[np.isfinite(scores.array)]
    names = [name for row in scores.columns.get("modality", ()) for name in row.split("+") if name]
    is_known = is_champion and len(values) > 0
    return DayFigures(
        day=day,
        rows=len(scores.value),
        unreadable=dict(unreadable),
        labels=dict(sorted(Counter(scores.columns.get("label", ())).items())),
        modalities=dict(sorted(Counter(names).items())),
        inputs=dict(inputs),
        champion=float(np.mean(values)) if is_known else None,
        champion_error=_standard_error(values, groups) if is_known else None,
    )


def usual_figures(today: DayFigures, before: Sequence[DayFigures]) -> tuple[Usual, ...]:
    """Returns figures of today beside those of earlier days, with their usual ranges."""
    return tuple(_figures(today, before))


def shares(counts: Mapping[str, int], total: int | None = None) -> dict[str, float]:
    """Returns counts as shares of ``total``, or of their sum."""
    whole = sum(counts.values()) if total is None else total
    return {name: count / whole for name, count in counts.items()} if whole else {}


def _figures(today: DayFigures, before: Sequence[DayFigures]) -> Iterator[Usual]:
    rows = [day.rows for day in before]
    yield _beside("rows", today.rows, rows, 0.5 * statistics.median(rows or [0]))
    yield _beside("unreadable", _unreadable(today), [_unreadable(day) for day in before], 0.01)
    if today.champion is not None:
        champion_values = [day.champion for day in before if day.champion is not None]
        yield _beside("champion's value", today.champion, champion_values, MANY_ERRORS * (today.champion_error or 0.0))
    yield from _share_figures("label", shares(today.labels), [shares(day.labels) for day in before], today.rows)
    present = [shares(day.modalities, day.rows) for day in before]
    yield from _share_figures("modality", shares(today.modalities, today.rows), present, today.rows)
    for name, figures in sorted(today.inputs.items()):
        means = [day.inputs[name].mean for day in before if name in day.inputs]
        if figures.mean is not None:
            floor = 0.1 * (figures.spread or 0.0)
            yield _beside(f"mean {name}", figures.mean, [mean for mean in means if mean is not None], floor)


def _share_figures(
    kind: str, today: Mapping[str, float], before: Sequence[Mapping[str, float]], rows: int
) -> Iterator[Usual]:
    """A share is remarkable only beyond the noise of today's number of rows."""
    for name in sorted({*today, *(name for day_shares in before for name in day_shares)}):
        past = [day_shares.get(name, 0.0) for day_shares in before]
        share = statistics.median(past or [0.0])
        floor = MANY_ERRORS * math.sqrt(max(share * (1 - share), 1 / max(1, rows)) / max(1, rows))
        yield _beside(f"{kind} {name}", today.get(name, 0.0), past, floor)


def _beside(name: str, today: float, before: Sequence[float], floor: float) -> Usual:
    """Few days give wide limits; each is at least ``floor`` from the median."""
    if not before:
        return Usual(name=name, today=float(today), usual=None, low=None, high=None)
    middle = float(statistics.median(before))
    spread = 1.4826 * statistics.median([abs(value - middle) for value in before])
    width = max(floor, MANY_SPREADS * spread) * (1 + 2 / len(before))
    return Usual(name=name, today=float(today), usual=middle, low=middle - width, high=middle + width)


def _unreadable(figures: DayFigures) -> float:
    count = sum(figures.unreadable.values())
    return count / max(1, figures.rows + count)


def _standard_error(values: np.ndarray, groups: np.ndarray) -> float:
    """Standard error of a mean over groups of rows; the values' spread for a single group."""
    number = np.unique(groups, return_inverse=True)[1]
    sums = np.bincount(number, weights=values - np.mean(values))
    if len(sums) == 1:
        return float(np.std(values))
    return float(np.sqrt(np.sum(sums**2) * len(sums) / (len(sums) - 1)) / len(values))
