"""Today's data against the days before, looked at before anything is trained on it.

Outside of what is usual, a figure is told; beyond its budget, the day is quarantined. So honest drift passes up to the
budgets. A budget has to be exceeded beyond chance: few rows prove little, and can do little harm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, ClassVar

from mosaic.artifact import Ge, Le
from mosaic.device import FORBID_EXTRA
from mosaic.retrain.intake.usual import DayFigures, shares, usual_figures
from mosaic.retrain.records import Finding, Usual

SURE = 2.0
"""Standard errors of today's own rows by which a budget has to be exceeded."""
MAX_CHANCE = 0.001
"""Rows of one class only are remarkable where that had no larger chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheckSettings:
    """The ``[check]`` table of a recipe: how far a day's data may be from what is usual."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    days: Annotated[int, Ge(1)] = 30
    """Trained days that say what is usual."""
    min_rows: Annotated[int, Ge(1)] = 1
    """A day with fewer rows is not trained on."""
    max_unreadable: Annotated[float, Ge(0), Le(1)] = 0.05
    """Share of rows that may be unreadable."""
    max_drop: Annotated[float, Ge(0)] = 0.2
    """How far the champion's mean value on today's rows may be below the usual, in units of the score."""
    max_label_shift: Annotated[float, Ge(0), Le(1)] = 0.5
    """Share of rows whose label may be another than usual (total variation)."""
    max_mean_shift: Annotated[float, Ge(0)] = 3.0
    """How far the mean of an input may be from the usual, in standard deviations of that input."""
    required_modalities: tuple[str, ...] = ()
    """A day without one of these is not trained on; without others the model is planned anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheck:
    """What the check found."""

    quarantine: bool
    """Whether today's rows must not be trained on."""
    reason: str
    """Why, in one sentence; empty where they may be."""
    findings: tuple[Finding, ...]
    """What was looked at; those that did not pass quarantine the day."""
    usual: tuple[Usual, ...]
    """Figures of today beside those of the days before."""
    replan: str
    """Why the model has to be planned anew, such as ``modality audio is missing``; empty where it need not be."""


def check_data(
    today: DayFigures,
    before: Sequence[DayFigures],
    settings: DataCheckSettings,
    *,
    today_rows: AbstractSet[str] = frozenset(),
    frozen_rows: AbstractSet[str] = frozenset(),
) -> DataCheck:
    """Compares today's data with the days before.

    Args:
        today: Today's figures.
        before: Those of days that were trained on, the oldest first; not those of quarantined ones.
        settings: Budgets.
        today_rows: Digests of today's rows.
        frozen_rows: Digests of the frozen rows, none of which may be among today's.
    """
    before = tuple(before)[-settings.days :]
    changed = tuple(_modality_changes(today, before))
    usual = usual_figures(today, before)
    findings = (
        _rows(today, settings),
        _leaked(today_rows, frozen_rows),
        *_unreadable(today, settings),
        *_champion(today, usual, settings),
        *_labels(today, before, settings),
        *_modalities(today, changed, settings),
        *_inputs(today, before, settings),
    )
    broken = [finding for finding in findings if not finding.passed]
    return DataCheck(
        quarantine=bool(broken),
        reason=broken[0].sentence if broken else "",
        findings=findings,
        usual=usual,
        replan=", ".join(f"modality {name} is {what}" for name, what in changed),
    )


def _rows(today: DayFigures, settings: DataCheckSettings) -> Finding:
    enough = today.rows >= settings.min_rows
    way_out = "" if enough else "; wait for more, or lower min_rows"
    sentence = f"There are {today.rows:,} rows, and min_rows = {settings.min_rows}{way_out}."
    return Finding(name="rows", passed=enough, sentence=sentence)


def _leaked(today: AbstractSet[str], frozen: AbstractSet[str]) -> Finding:
    both = len(today & frozen)
    sentence = (
        f"{both:,} of today's {len(today):,} rows are frozen rows, and none may be: training on them would make the "
        "gate blind; take them out of the day's folder."
        if both
        else "No frozen row is among today's rows."
    )
    return Finding(name="frozen rows", passed=not both, sentence=sentence)


def _unreadable(today: DayFigures, settings: DataCheckSettings) -> Iterator[Finding]:
    count = sum(today.unreadable.values())
    if count:
        kept = count <= settings.max_unreadable * (today.rows + count)
        reasons = ", ".join(f"{reason} ({number:,})" for reason, number in sorted(today.unreadable.items()))
        yield Finding(
            name="unreadable",
            passed=kept,
            sentence=f"{count:,} of {today.rows + count:,} rows could not be read: {reasons}; "
            f"max_unreadable = {settings.max_unreadable:.0%}{'' if kept else ': mend the files or raise it'}.",
        )


def _champion(today: DayFigures, usual: Sequence[Usual], settings: DataCheckSettings) -> Iterator[Finding]:
    """Wrong labels and other data both show as rows on which the champion suddenly errs."""
    for one in usual:
        if one.name != "champion's value" or one.usual is None or one.low is None:
            continue
        noise = SURE * (today.champion_error or 0.0)
        kept = one.usual - one.today - noise <= settings.max_drop
        said = f"The champion's mean value on today's rows is {one.today:.4f}, usually {one.usual:.4f}"
        if not kept:
            said += f", and max_drop = {settings.max_drop:g}: look at today's labels, and raise it if they are right"
        elif one.today < one.low:
            said += ", less than the days before explain: the data drifts, or some labels are wrong"
        yield Finding(name="champion's error", passed=kept, sentence=f"{said}.")


def _labels(today: DayFigures, before: Sequence[DayFigures], settings: DataCheckSettings) -> Iterator[Finding]:
    known = [shares(one.labels) for one in before if one.labels]
    total = sum(today.labels.values())
    if not known or not today.rows:
        return
    if not total:
        sentence = "No row has a label today, and rows of the days before had: look at how today's rows are read."
        yield Finding(name="labels", passed=False, sentence=sentence)
        return
    now, usual = shares(today.labels), _median_shares(known)
    shift = sum(abs(now.get(name, 0.0) - usual.get(name, 0.0)) for name in {*now, *usual}) / 2
    noise = sum(math.sqrt(share * (1 - share) / total) for share in usual.values()) / 2
    most = max(now, key=now.__getitem__)
    alone = now[most] == 1 and usual.get(most, 0.0) ** total < MAX_CHANCE
    kept = shift - SURE * noise <= settings.max_label_shift and not alone
    said = f"{shift:.0%} of labels are others than usual, and max_label_shift = {settings.max_label_shift:.0%}"
    if alone:
        said = f"All {total:,} rows have the label {most}, which usually {usual.get(most, 0.0):.0%} have"
    way_out = "" if kept else ": look at how today's rows were collected"
    yield Finding(name="labels", passed=kept, sentence=f"{said}{way_out}.")


def _median_shares(days: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each share over days, scaled to add up to 1."""
    names = {name for one in days for name in one}
    medians = {name: statistics.median([one.get(name, 0.0) for one in days]) for name in names}
    whole = sum(medians.values())
    return {name: share / whole for name, share in medians.items()} if whole else medians


def _modality_changes(today: DayFigures, before: Sequence[DayFigures]) -> Iterator[tuple[str, str]]:
    """Modalities that came or went since the last day that was trained on."""
    if before:
        present = {name for name, count in today.modalities.items() if count}
        last = {name for name, count in before[-1].modalities.items() if count}
        yield from ((name, "missing") for name in sorted(last - present))
        yield from ((name, "new") for name in sorted(present - last))


def _modalities(
    today: DayFigures, changed: Sequence[tuple[str, str]], settings: DataCheckSettings
) -> Iterator[Finding]:
    for name in settings.required_modalities:
        if not today.modalities.get(name):
            sentence = f"Modality {name} is missing today, and it is one of required_modalities: look for its files."
            yield Finding(name="modalities", passed=False, sentence=sentence)
    for name, what in changed:
        if what == "new" or name not in settings.required_modalities:
            sentence = f"Modality {name} is {what} today: the model is planned anew."
            yield Finding(name="modalities", passed=True, sentence=sentence)


def _inputs(today: DayFigures, before: Sequence[DayFigures], settings: DataCheckSettings) -> Iterator[Finding]:
    for name, figures in sorted(today.inputs.items()):
        if figures.mean is None or figures.spread is None:
            sentence = f"Input {name} has values that are not finite: look at today's files."
            yield Finding(name=f"mean {name}", passed=False, sentence=sentence)
            continue
        known = [one.inputs[name] for one in before if name in one.inputs]
        means = [one.mean for one in known if one.mean is not None]
        spreads = [one.spread for one in known if one.spread is not None]
        if not means or not spreads:
            continue
        usual, spread = statistics.median(means), statistics.median(spreads)
        distance = abs(figures.mean - usual)
        kept = distance <= settings.max_mean_shift * spread or math.isclose(figures.mean, usual, rel_tol=1e-6)
        said = f"Input {name} has a mean of {figures.mean:.4g}, usually {usual:.4g} with a spread of {spread:.4g}"
        rule = "" if kept else f"; max_mean_shift = {settings.max_mean_shift:g} spreads: look for other units or scales"
        yield Finding(name=f"mean {name}", passed=kept, sentence=f"{said}{rule}.")
