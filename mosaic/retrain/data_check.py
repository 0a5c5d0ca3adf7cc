"""The check of today's data against earlier days, before training.

A day's data is summed up in figures, and their median over earlier days is the usual value. A figure beyond its limit
quarantines the day; honest drift passes up to the limit. Only an excess beyond chance counts: few rows prove little,
and can do little harm.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from mosaic.artifact import Ge, Le, StrictFile
from mosaic.retrain.gate import Finding, Scores

SURE = 2.0
"""Standard errors of today's own rows by which a limit has to be exceeded."""
MAX_CHANCE = 0.001
"""Largest chance at which rows of a single class are remarkable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheckSettings(StrictFile):
    """The ``[check]`` table of a recipe: limits of a day's data against the usual."""

    days: Annotated[int, Ge(1)] = 30
    """Trained days that define the usual."""
    min_rows: Annotated[int, Ge(1)] = 1
    """A day with fewer rows is not trained on."""
    max_unreadable: Annotated[float, Ge(0), Le(1)] = 0.05
    """Share of rows that may be unreadable; training, which may draw a row again, fails at twice this share."""
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

    schema_version: int = 1
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
    reason: str
    """Reason, in one sentence; empty without a quarantine."""
    findings: tuple[Finding, ...]
    """Findings; one that did not pass quarantines the day."""


def day_figures(
    day: str,
    scores: Scores,
    *,
    unreadable: Mapping[str, int],
    inputs: Mapping[str, InputFigures],
    is_champion: bool = True,
    known: Collection[str] = (),
) -> DayFigures:
    """Returns a day's figures from scores on all readable rows.

    The columns ``label`` and ``modality`` are counted, ``image+audio`` as both. Scores of another model than the
    champion give only these. The champion's error leaves out modalities that are not ``known`` from earlier days.
    """
    modalities = [row.split("+") for row in scores.columns.get("modality", ())]
    is_judged = np.isfinite(scores.array)
    if known and modalities:
        is_judged &= [set(names) <= set(known) for names in modalities]
    values = scores.array[is_judged]
    clusters = np.array(scores.cluster or range(len(scores.value)))[is_judged]
    names = [name for row in modalities for name in row if name]
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
    findings = (
        *_rows(today, settings, today_rows, frozen_rows),
        *_champion(today, before, settings),
        *_labels(today, before, settings),
        *_modalities(today, before, settings),
        *_inputs(today, before, settings),
    )
    reason = next((finding.sentence for finding in findings if not finding.passed), "")
    return DataCheck(quarantine=bool(reason), reason=reason, findings=findings)


def _rows(
    today: DayFigures, settings: DataCheckSettings, today_rows: AbstractSet[str], frozen_rows: AbstractSet[str]
) -> Iterator[Finding]:
    sentence = f"There are {today.rows:,} rows, and min_rows = {settings.min_rows}"
    yield Finding.of("rows", today.rows >= settings.min_rows, sentence, "; wait for more, or lower min_rows")
    overlap = len(today_rows & frozen_rows)
    sentence = f"{overlap:,} of today's {len(today_rows):,} rows are frozen rows"
    remedy = ", and training on them would make the gate blind: take them out of the day's folder"
    yield Finding.of("frozen rows", not overlap, sentence, remedy)
    if count := sum(today.unreadable.values()):
        reasons = ", ".join(f"{reason} ({number:,})" for reason, number in sorted(today.unreadable.items()))
        sentence = f"{count:,} of {today.rows + count:,} rows could not be read: {reasons}; "
        sentence += f"max_unreadable = {settings.max_unreadable:.0%}"
        passed = count <= settings.max_unreadable * (today.rows + count)
        yield Finding.of("unreadable", passed, sentence, ": mend the files or raise it")


def _champion(today: DayFigures, before: Sequence[DayFigures], settings: DataCheckSettings) -> Iterator[Finding]:
    """Wrong labels and unusual data both raise the champion's error."""
    earlier = [day.champion for day in before if day.champion is not None]
    if today.champion is None or not earlier:
        return
    usual = statistics.median(earlier)
    drop = usual - today.champion - SURE * (today.champion_error or 0.0)
    sentence = f"The champion's mean value on today's rows is {today.champion:.4f}, usually {usual:.4f}"
    if 0 < drop <= settings.max_drop:
        sentence += ", less than chance explains: the data drifts, or some labels are wrong"
    remedy = f", and max_drop = {settings.max_drop:g}: look at today's labels, and raise it if they are right"
    yield Finding.of("champion's error", drop <= settings.max_drop, sentence, remedy)


def _labels(today: DayFigures, before: Sequence[DayFigures], settings: DataCheckSettings) -> Iterator[Finding]:
    earlier = [_shares(day.labels) for day in before if day.labels]
    total = sum(today.labels.values())
    if not earlier or not today.rows:
        return
    if not total:
        sentence = "No row has a label today, and rows of the days before had: look at how today's rows are read"
        yield Finding.of("labels", False, sentence)
        return
    names = {name for shares in earlier for name in shares}
    medians = {name: statistics.median(shares.get(name, 0.0) for shares in earlier) for name in names}
    now, usual = _shares(today.labels), _shares(medians)
    shift = sum(abs(now.get(name, 0.0) - usual.get(name, 0.0)) for name in {*now, *usual}) / 2
    noise = sum(math.sqrt(share * (1 - share) / total) for share in usual.values()) / 2
    most = max(now, key=now.__getitem__)
    alone = now[most] == 1 and usual.get(most, 0.0) ** total < MAX_CHANCE
    sentence = f"{shift:.0%} of labels are others than usual, and max_label_shift = {settings.max_label_shift:.0%}"
    if alone:
        sentence = f"All {total:,} rows have the label {most}, which usually {usual.get(most, 0.0):.0%} have"
    passed = shift - SURE * noise <= settings.max_label_shift and not alone
    yield Finding.of("labels", passed, sentence, ": look at how today's rows were collected")


def _shares(counts: Mapping[str, float]) -> dict[str, float]:
    whole = sum(counts.values())
    return {name: count / whole for name, count in counts.items()} if whole else {}


def _modalities(today: DayFigures, before: Sequence[DayFigures], settings: DataCheckSettings) -> Iterator[Finding]:
    """Requires some modalities; a change of the others is shown, and the model is planned anew."""
    present = set(today.modalities)
    missing = set(settings.required_modalities) - present
    for name in sorted(missing):
        sentence = f"Modality {name} is missing today, and it is one of required_modalities: look for its files"
        yield Finding.of("modalities", False, sentence)
    for name in sorted((set(before[-1].modalities) ^ present if before else set()) - missing):
        change = "new" if name in present else "missing"
        yield Finding.of("modalities", True, f"Modality {name} is {change} today: the model is planned anew")


def _inputs(today: DayFigures, before: Sequence[DayFigures], settings: DataCheckSettings) -> Iterator[Finding]:
    for name, figures in sorted(today.inputs.items()):
        if figures.mean is None or figures.spread is None:
            sentence = f"Input {name} has values that are not finite: look at today's files"
            yield Finding.of(f"mean {name}", False, sentence)
            continue
        earlier = [day.inputs[name] for day in before if name in day.inputs]
        means = [each.mean for each in earlier if each.mean is not None]
        spreads = [each.spread for each in earlier if each.spread is not None]
        if not means or not spreads:
            continue
        usual, spread, most = statistics.median(means), statistics.median(spreads), settings.max_mean_shift
        passed = abs(figures.mean - usual) <= most * spread or math.isclose(figures.mean, usual, rel_tol=1e-6)
        sentence = f"Input {name} has a mean of {figures.mean:.4g}, usually {usual:.4g} with a spread of {spread:.4g}"
        remedy = f"; max_mean_shift = {most:g} spreads: look for other units or scales"
        yield Finding.of(f"mean {name}", passed, sentence, remedy)
