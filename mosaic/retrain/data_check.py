"""The check of today's data against earlier days, before training.

A day's data is summed up in figures. The usual range of each is the median of earlier days and their spread about it.
The report shows unusual figures; a figure beyond its limit quarantines the day. Honest drift passes up to the limits.
Only an excess beyond chance counts: few rows prove little, and can do little harm.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from mosaic.artifact import Ge, Le
from mosaic.device import StrictFile
from mosaic.retrain.gate import Scores
from mosaic.retrain.records import Finding, Usual

SURE = 2.0
"""Standard errors of today's own rows by which a limit has to be exceeded."""
MAX_CHANCE = 0.001
"""Largest chance at which rows of a single class are remarkable."""
MANY_SPREADS = 4.0
"""Robust standard deviations from the median beyond which a figure is unusual."""
MANY_ERRORS = 3.0
"""Standard errors of today's rows from the median beyond which a figure is unusual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheckSettings(StrictFile):
    """The ``[check]`` table of a recipe: limits of a day's data against the usual."""

    days: Annotated[int, Ge(1)] = 30
    """Trained days that define the usual."""
    min_rows: Annotated[int, Ge(1)] = 1
    """A day with fewer rows is not trained on."""
    max_unreadable: Annotated[float, Ge(0), Le(1)] = 0.05
    """Share of rows that may be unreadable."""
    max_drop: Annotated[float, Ge(0)] = 0.2
    """Largest drop of the champion's mean value on today's rows below the usual, in units of the score."""
    max_label_shift: Annotated[float, Ge(0), Le(1)] = 0.5
    """Share of rows whose label may be another than usual (total variation)."""
    max_mean_shift: Annotated[float, Ge(0)] = 3.0
    """Largest distance of an input's mean from the usual, in standard deviations of that input."""
    required_modalities: tuple[str, ...] = ()
    """A day without one of these is quarantined; without others the model is planned anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFigures:
    """Mean and standard deviation of an input over a day's rows; None if not finite."""

    mean: float | None
    spread: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DayFigures:
    """``figures.json``: figures of a day's data."""

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    day: str
    rows: int
    """Readable rows."""
    unreadable: dict[str, int]
    """Unreadable rows, by reason."""
    labels: dict[str, int]
    """Rows by label; empty without labels."""
    modalities: dict[str, int]
    """Rows by modality; a row of several counts in each. Empty without modalities."""
    inputs: dict[str, InputFigures]
    champion: float | None
    """The champion's mean value on the day's rows, or on some of them; None without a champion."""
    champion_error: float | None
    """Standard error of that mean, by clusters of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheck:
    """``data_check.json``: the result of the check."""

    quarantine: bool
    """True if today's rows must not be trained on."""
    reason: str
    """Reason, in one sentence; empty without a quarantine."""
    findings: tuple[Finding, ...]
    """Findings; one that did not pass quarantines the day."""
    usual: tuple[Usual, ...]
    """Figures of today beside those of earlier days."""


def day_figures(
    day: str,
    scores: Scores,
    *,
    unreadable: Mapping[str, int],
    inputs: Mapping[str, InputFigures],
    is_champion: bool = True,
) -> DayFigures:
    """Returns a day's figures from scores on all readable rows.

    The columns ``label`` and ``modality`` are counted, ``image+audio`` as both. Scores of another model than the
    champion give only these.
    """
    is_finite = np.isfinite(scores.array)
    values = scores.array[is_finite]
    clusters = np.array(scores.cluster or range(len(scores.value)))[is_finite]
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
        champion_error=_standard_error(values, clusters) if is_known else None,
    )


def _standard_error(values: np.ndarray, clusters: np.ndarray) -> float:
    """Standard error of a mean over clusters of rows; the values' spread for a single cluster."""
    number = np.unique(clusters, return_inverse=True)[1]
    sums = np.bincount(number, weights=values - np.mean(values))
    if len(sums) == 1:
        return float(np.std(values))
    return float(np.sqrt(np.sum(sums**2) * len(sums) / (len(sums) - 1)) / len(values))


def check_data(
    today: DayFigures,
    before: Sequence[DayFigures],
    settings: DataCheckSettings,
    *,
    today_rows: AbstractSet[str] = frozenset(),
    frozen_rows: AbstractSet[str] = frozenset(),
) -> DataCheck:
    """Compares today's data with trained days, the oldest first; digests of rows find frozen rows among today's."""
    before = tuple(before)[-settings.days :]
    usual = tuple(_usual_figures(today, before))
    findings = (
        _rows(today, settings),
        _leaked(today_rows, frozen_rows),
        *_unreadable(today, settings),
        *_champion(today, usual, settings),
        *_labels(today, before, settings),
        *_modalities(today, before, settings),
        *_inputs(today, before, settings),
    )
    broken = [finding for finding in findings if not finding.passed]
    reason = broken[0].sentence if broken else ""
    return DataCheck(quarantine=bool(broken), reason=reason, findings=findings, usual=usual)


# Rules.


def _rows(today: DayFigures, settings: DataCheckSettings) -> Finding:
    sentence = f"There are {today.rows:,} rows, and min_rows = {settings.min_rows}"
    return Finding.of("rows", today.rows >= settings.min_rows, sentence, "; wait for more, or lower min_rows")


def _leaked(today: AbstractSet[str], frozen: AbstractSet[str]) -> Finding:
    overlap = len(today & frozen)
    sentence = "No frozen row is among today's rows"
    if overlap:
        sentence = (
            f"{overlap:,} of today's {len(today):,} rows are frozen rows, and none may be: training on them would make "
            "the gate blind; take them out of the day's folder"
        )
    return Finding.of("frozen rows", not overlap, sentence)


def _unreadable(today: DayFigures, settings: DataCheckSettings) -> Iterator[Finding]:
    if count := sum(today.unreadable.values()):
        reasons = ", ".join(f"{reason} ({number:,})" for reason, number in sorted(today.unreadable.items()))
        sentence = f"{count:,} of {today.rows + count:,} rows could not be read: {reasons}; "
        sentence += f"max_unreadable = {settings.max_unreadable:.0%}"
        passed = count <= settings.max_unreadable * (today.rows + count)
        yield Finding.of("unreadable", passed, sentence, ": mend the files or raise it")


def _champion(today: DayFigures, usual: Sequence[Usual], settings: DataCheckSettings) -> Iterator[Finding]:
    """Wrong labels and unusual data both raise the champion's error."""
    for figure in usual:
        if figure.name == "champion's value" and figure.usual is not None and figure.low is not None:
            passed = figure.usual - figure.today - SURE * (today.champion_error or 0.0) <= settings.max_drop
            sentence = f"The champion's mean value on today's rows is {figure.today:.4f}, usually {figure.usual:.4f}"
            if passed and figure.today < figure.low:
                sentence += ", less than the days before explain: the data drifts, or some labels are wrong"
            way_out = f", and max_drop = {settings.max_drop:g}: look at today's labels, and raise it if they are right"
            yield Finding.of("champion's error", passed, sentence, way_out)


def _labels(today: DayFigures, before: Sequence[DayFigures], settings: DataCheckSettings) -> Iterator[Finding]:
    label_shares = [_shares(figures.labels) for figures in before if figures.labels]
    total = sum(today.labels.values())
    if not label_shares or not today.rows:
        return
    if not total:
        sentence = "No row has a label today, and rows of the days before had: look at how today's rows are read"
        yield Finding.of("labels", False, sentence)
        return
    medians = {
        name: statistics.median([shares.get(name, 0.0) for shares in label_shares])
        for name in {name for shares in label_shares for name in shares}
    }
    now, usual = _shares(today.labels), _shares(medians) or medians
    shift = sum(abs(now.get(name, 0.0) - usual.get(name, 0.0)) for name in {*now, *usual}) / 2
    noise = sum(math.sqrt(share * (1 - share) / total) for share in usual.values()) / 2
    most = max(now, key=now.__getitem__)
    alone = now[most] == 1 and usual.get(most, 0.0) ** total < MAX_CHANCE
    sentence = f"{shift:.0%} of labels are others than usual, and max_label_shift = {settings.max_label_shift:.0%}"
    if alone:
        sentence = f"All {total:,} rows have the label {most}, which usually {usual.get(most, 0.0):.0%} have"
    passed = shift - SURE * noise <= settings.max_label_shift and not alone
    yield Finding.of("labels", passed, sentence, ": look at how today's rows were collected")


def _modalities(today: DayFigures, before: Sequence[DayFigures], settings: DataCheckSettings) -> Iterator[Finding]:
    """Requires some modalities; a change of the others is shown, and the model is planned anew."""
    present = {name for name, count in today.modalities.items() if count}
    last = {name for name, count in before[-1].modalities.items() if count} if before else present
    required = settings.required_modalities
    for name in required:
        if name not in present:
            sentence = f"Modality {name} is missing today, and it is one of required_modalities: look for its files"
            yield Finding.of("modalities", False, sentence)
    for name in sorted(last ^ present):
        if name in present or name not in required:
            change = "new" if name in present else "missing"
            yield Finding.of("modalities", True, f"Modality {name} is {change} today: the model is planned anew")


def _inputs(today: DayFigures, before: Sequence[DayFigures], settings: DataCheckSettings) -> Iterator[Finding]:
    for name, figures in sorted(today.inputs.items()):
        if figures.mean is None or figures.spread is None:
            yield Finding.of(
                f"mean {name}", False, f"Input {name} has values that are not finite: look at today's files"
            )
            continue
        earlier = [day.inputs[name] for day in before if name in day.inputs]
        means = [each.mean for each in earlier if each.mean is not None]
        spreads = [each.spread for each in earlier if each.spread is not None]
        if not means or not spreads:
            continue
        usual, spread, most = statistics.median(means), statistics.median(spreads), settings.max_mean_shift
        passed = abs(figures.mean - usual) <= most * spread or math.isclose(figures.mean, usual, rel_tol=1e-6)
        sentence = f"Input {name} has a mean of {figures.mean:.4g}, usually {usual:.4g} with a spread of {spread:.4g}"
        way_out = f"; max_mean_shift = {most:g} spreads: look for other units or scales"
        yield Finding.of(f"mean {name}", passed, sentence, way_out)


# Usual ranges.


def _usual_figures(today: DayFigures, before: Sequence[DayFigures]) -> Iterator[Usual]:
    def unreadable(day: DayFigures) -> float:
        count = sum(day.unreadable.values())
        return count / max(1, day.rows + count)

    def shares(kind: str) -> Iterator[Usual]:
        """A share is unusual only beyond the noise of today's number of rows."""
        past = [_shares(getattr(day, kind), None if kind == "labels" else day.rows) for day in before]
        now = _shares(getattr(today, kind), None if kind == "labels" else today.rows)
        rows = max(1, today.rows)
        for name in sorted({*now, *(name for day in past for name in day)}):
            earlier = [day.get(name, 0.0) for day in past]
            share = statistics.median(earlier or [0.0])
            floor = MANY_ERRORS * math.sqrt(max(share * (1 - share), 1 / rows) / rows)
            yield _usual(f"{'label' if kind == 'labels' else 'modality'} {name}", now.get(name, 0.0), earlier, floor)

    rows = [day.rows for day in before]
    yield _usual("rows", today.rows, rows, 0.5 * statistics.median(rows or [0]))
    yield _usual("unreadable", unreadable(today), [unreadable(day) for day in before], 0.01)
    if today.champion is not None:
        floor = MANY_ERRORS * (today.champion_error or 0.0)
        yield _usual("champion's value", today.champion, [day.champion for day in before], floor)
    yield from shares("labels")
    yield from shares("modalities")
    for name, figures in sorted(today.inputs.items()):
        if figures.mean is not None:
            means = [day.inputs[name].mean for day in before if name in day.inputs]
            yield _usual(f"mean {name}", figures.mean, means, 0.1 * (figures.spread or 0.0))


def _usual(name: str, today: float, before: Sequence[float | None], floor: float) -> Usual:
    """Few days give wide limits; each is at least ``floor`` from the median."""
    known = [value for value in before if value is not None]
    if not known:
        return Usual(name=name, today=float(today), usual=None, low=None, high=None)
    middle = float(statistics.median(known))
    spread = 1.4826 * statistics.median([abs(value - middle) for value in known])
    width = max(floor, MANY_SPREADS * spread) * (1 + 2 / len(known))
    return Usual(name=name, today=float(today), usual=middle, low=middle - width, high=middle + width)


def _shares(counts: Mapping[str, float], total: float | None = None) -> dict[str, float]:
    whole = sum(counts.values()) if total is None else total
    return {name: count / whole for name, count in counts.items()} if whole else {}
