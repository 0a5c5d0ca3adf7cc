"""The gate, which decides if a challenger replaces the champion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
from numpy.typing import NDArray

from mosaic.errors import MosaicError
from mosaic.retrain.gate.compare import compare, compare_slices
from mosaic.retrain.gate.renewal import wear_finding
from mosaic.retrain.gate.scores import DayScores, Pair, RowSet, Scores, paired
from mosaic.retrain.gate.settings import GateSettings
from mosaic.retrain.gate.validity import finite_finding
from mosaic.retrain.records import Comparison, Finding, GateResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The versions of a decision, and the facts beside their scores."""

    day: str
    """Cut-off of the data, a date such as ``2026-11-22``."""
    challenger: str
    """The day's version."""
    champion: str | None
    """The version in force; None for none yet."""
    anchor: str | None
    """The approved version; None for none."""
    findings: tuple[Finding, ...] = ()
    """Findings on validity; see ``validity_findings``."""
    refused_before: int = 0
    """Consecutive refused days before this one."""
    looks: int = 0
    """Decisions made on these frozen rows."""
    folder: str = "FOLDER"
    """The retraining folder, as on a command line."""


def decide(scores: DayScores, contest: Contest, settings: GateSettings) -> GateResult:
    """Judges a challenger; the same scores give the same result.

    All of these must hold: it is valid; on the frozen rows it loses no more than the margin against the champion, no
    more than some margins against the anchor, and in no slice shows a larger loss; on fresh rows it is not inferior. A
    clear gain on fresh rows over the champion (the anchor) lowers the limits against it by ``frozen_budget``, for old
    frozen rows only: fresh rows, whose labels may be wrong, never promote by themselves.

    The anchor needs scores on fresh rows only if ``frozen_budget`` is above 0.

    Raises:
        MosaicError: The champion or the anchor has no scores on the challenger's rows.
    """
    findings = tuple(_findings(scores, contest, settings))
    broken = [finding for finding in findings if not finding.passed]
    comparisons = () if broken else tuple(_comparisons(scores, contest, settings))
    failed = [comparison for comparison in comparisons if comparison.counts and not comparison.passed]
    passes = not broken and not failed
    if passes:
        reason = _why_promoted(comparisons, contest)
    else:
        first = broken[0].sentence if broken else _why_refused(failed[0], contest.challenger)
        others = len(broken) + len(failed) - 1
        reason = first if not others else f"{first.removesuffix('.')}; {others} more did not pass."
    return GateResult(
        passes=passes,
        reason=reason,
        todo=_todo(passes, contest, settings),
        comparisons=comparisons,
        findings=findings,
        margin=settings.margin,
        confidence=settings.confidence,
    )


def _findings(scores: DayScores, contest: Contest, settings: GateSettings) -> Iterator[Finding]:
    """Findings on the challenger's validity and on the frozen rows."""
    yield from contest.findings
    yield finite_finding(each for each in scores.scores if each.version == contest.challenger)
    frozen = scores.find(contest.challenger, "frozen")
    if frozen is None:
        sentence = "There are no frozen rows to judge by; put rows into the recipe's frozen folder."
        yield Finding(name="frozen rows", passed=False, sentence=sentence)
        return
    for version in sorted({contest.champion, contest.anchor} - {None, contest.challenger}, key=str):
        yield from _left_out(scores.find(version, "frozen"))
    if settings.min_value is not None:
        value = float(np.nanmean(frozen.array)) if frozen.num_invalid < len(frozen.value) else float("nan")
        reached = value >= settings.min_value
        sentence = f"The mean value on the frozen rows is {value:.4f}, and min_value = {settings.min_value:g} is asked."
        yield Finding(name="min_value", passed=reached, sentence=sentence)
    yield wear_finding(contest.looks, settings)


def _left_out(old: Scores | None) -> Iterator[Finding]:
    """Rows without a value of the compared version."""
    if old is None or not old.num_invalid:
        return
    some = old.num_invalid < len(old.value)
    sentence = f"Version {old.version} has no finite value on {old.num_invalid:,} of {len(old.value):,} frozen rows"
    way_out = "they are left out" if some else "look at it, and promote another version by hand"
    yield Finding(name="rows left out", passed=some, sentence=f"{sentence}; {way_out}.")


def _comparisons(scores: DayScores, contest: Contest, settings: GateSettings) -> Iterator[Comparison]:
    """Frozen rows, the anchor, slices, fresh rows."""
    new, margin = contest.challenger, settings.margin
    fresh = _fresh(scores, new, contest.champion, settings)
    bought = _bought(fresh, settings)
    frozen = _pair(scores, new, contest.champion, "frozen")
    if frozen is not None:
        yield from _frozen("frozen", frozen, (margin, bought), contest, settings)
    anchor = _pair(scores, new, contest.anchor, "frozen")
    if anchor is not None:
        gain = _fresh(scores, new, contest.anchor, settings) if settings.frozen_budget else None
        losses = (settings.anchor_margins * margin, _bought(gain, settings))
        yield from _frozen("anchor", anchor, losses, contest, settings)
    if frozen is not None:
        yield from compare_slices(frozen, -settings.slice_margins * margin - bought, settings)
    if fresh is not None:
        yield fresh


def _frozen(
    name: str, pair: Pair, losses: tuple[float, float], contest: Contest, settings: GateSettings
) -> Iterator[Comparison]:
    """All frozen rows; if they fail and a loss was bought, old ones with it and recent ones without."""
    allowed, bought = losses
    plain = compare(name, pair, -allowed, settings)
    if plain.passed or not bought:
        yield plain
        return
    recent = _recent(pair, contest.day, settings)
    if not recent.all():
        yield compare(name, pair.only(~recent), -allowed - bought, settings)
    if recent.any():
        counts = int(recent.sum()) >= settings.min_slice_rows or bool(recent.all())
        yield compare(f"{name}, recent rows", pair.only(recent), -allowed, settings, counts=counts)


def _fresh(scores: DayScores, challenger: str, against: str | None, settings: GateSettings) -> Comparison | None:
    pair = _pair(scores, challenger, against, "fresh")
    if pair is None or not len(pair.old):
        return None
    counts = len(pair.old) >= settings.min_slice_rows
    return compare("fresh", pair, -settings.fresh_margins * settings.margin, settings, counts=counts)


def _bought(fresh: Comparison | None, settings: GateSettings) -> float:
    """Returns the loss on old frozen rows that a gain on fresh rows allows."""
    return settings.frozen_budget if fresh is not None and fresh.counts and fresh.low > 0 else 0.0


def _pair(scores: DayScores, challenger: str, against: str | None, rows: RowSet) -> Pair | None:
    new = scores.find(challenger, rows)
    if new is None or against is None:
        return None
    old = scores.find(against, rows)
    if old is None:
        raise MosaicError(
            f"version {against} was not scored on the {rows} rows that {challenger} was scored on; score both"
        )
    return paired(new, old)


def _recent(pair: Pair, day: str, settings: GateSettings) -> NDArray[np.bool_]:
    """Returns the mask of recent frozen rows; rows of the first set have no date."""
    added = pair.columns.get("added")
    if added is None:
        return np.zeros(len(pair.old), dtype=np.bool_)
    first = (date.fromisoformat(day[:10]) - timedelta(days=settings.recent_days)).isoformat()
    return np.array([date[:10] > first for date in added], dtype=np.bool_)


def _why_promoted(comparisons: tuple[Comparison, ...], contest: Contest) -> str:
    new = contest.challenger
    frozen = next((comparison for comparison in comparisons if comparison.name == "frozen"), None)
    if frozen is None:
        against = f" against the anchor {contest.anchor}" if contest.anchor is not None else ""
        return f"There was no champion yet, and {new} passes every check{against}."
    change = f"{frozen.difference:+.4f}, at least {frozen.low:+.4f} on {frozen.num_rows:,} frozen rows"
    if frozen.low > 0:
        return f"{new} is better than {frozen.against}: {change}."
    if frozen.difference < 0 and frozen.limit < 0:
        return f"{new} loses no more against {frozen.against} than is allowed ({-frozen.limit:g}): {change}."
    return f"{new} is as good as {frozen.against} within {-frozen.limit:g}: {change}."


def _why_refused(comparison: Comparison, challenger: str) -> str:
    names = {"frozen": "on the frozen rows", "fresh": "on the day's fresh rows", "anchor": "(the anchor)"}
    where = names.get(comparison.name, f"on {comparison.name}")
    change = f"{comparison.new:.4f} after {comparison.old:.4f}, which may be a loss of {-comparison.low:.4f}"
    change += f"; {-comparison.limit:.4g} is allowed"
    kind = "is worse than" if comparison.high < 0 else "cannot be shown to be as good as"
    return f"{challenger} {kind} {comparison.against} {where}: {change}."


def _todo(passes: bool, contest: Contest, settings: GateSettings) -> str:
    refused = contest.refused_before + 1
    if not passes:
        return (
            f"{refused} days in a row were refused: look at what changed. Then mend the data or the model, set "
            "frozen_budget if the world has changed, or promote by hand: "
            f"mosaic retrain promote {contest.folder} {contest.challenger}"
            if refused >= settings.alarm_after
            else ""
        )
    todo = []
    if contest.anchor is None:
        todo.append(
            "No version is approved as the anchor, so small losses can add up day by day: look at "
            f"{contest.challenger}, then mosaic retrain promote {contest.folder} {contest.challenger}."
        )
    if contest.looks >= settings.max_looks:
        todo.append(f"The frozen rows have decided {contest.looks} times: bring new ones, or set renew_rows.")
    return " ".join(todo)
