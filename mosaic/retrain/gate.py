"""The gate, which decides if a challenger replaces the champion: a paired bootstrap over clusters of rows.

The statistic is the mean over all rows of ``new - old``. Whole clusters are resampled, and the lower end of the
interval has to lie above minus the margin. Two corrections prevent overconfidence:

* *Few clusters.* Percentiles move further out, as Student's t requires for the number of clusters (Hesterberg, What
  Teachers Should Know about the Bootstrap, 2014, "expanded percentiles"). Clusters of unequal size count as fewer.
* *Few differences.* Two models that agree on ten rows prove little. So one cluster a whole value better and one a whole
  value worse are added (cf. Bonett and Price 2012 for paired proportions), and one row more on the side that a bound
  looks to. A whole value is the root mean square of the old values. The added clusters have as many rows as a cluster
  of the usual size is worth, given the intraclass correlation of the old values.

Clusters are ordered by size and sum before they are drawn, and draws do not depend on values. So the order of rows does
not matter, and if no row of a challenger is worse than that of another, no bound of it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mosaic.artifact import Ge, StrictFile
from mosaic.errors import MosaicError

RowSet = Literal["frozen", "fresh"]
"""Rows that stay for many days, or rows held out of the day's new data."""
Floats = NDArray[np.float64]
MAX_WEIGHTS = 4_000_000
"""Numbers in memory at once, 32 MB; more clusters need several batches of resamples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings(StrictFile):
    """The ``[gate]`` table of a recipe. Margins are in units of the score, where larger is better."""

    margin: float = 0.01
    """Loss against the champion that a challenger may have on the frozen rows; above 0."""
    confidence: float = 0.95
    """One-sided confidence that no more is lost; from 0.5 to below 1."""
    anchor_margins: Annotated[float, Ge(0)] = 2.0
    """Loss allowed against the anchor, in margins."""
    fresh_margins: Annotated[float, Ge(0)] = 3.0
    """Loss allowed on the rows held out of the day's new data, in margins: they are few."""
    min_fresh_rows: Annotated[int, Ge(1)] = 200
    """Fewer fresh rows are shown and do not count."""
    slices: tuple[str, ...] = ()
    """Columns of the score, such as ``site``, by whose values the frozen rows are shown; they do not decide."""
    min_value: float | None = None
    """Mean value on the frozen rows that every challenger must reach, the first one too; None for any."""
    resamples: Annotated[int, Ge(1000)] = 2000
    """Resamples of the bootstrap."""

    def __post_init__(self) -> None:
        if not 0 < self.margin < float("inf"):
            raise ValueError(f"margin = {self.margin} must be above 0: set the loss that you would not notice")
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence = {self.confidence} must be from 0.5 to below 1, such as 0.95")


# Scores.


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of one version on one set of rows, in row order."""

    version: str
    rows: RowSet
    value: tuple[float | None, ...]
    """One per row, larger is better; None if it was not finite."""
    cluster: tuple[str, ...] = ()
    """One per row: rows of one recording, robot or shop are resampled together. Empty: each row is its own cluster."""
    columns: dict[str, tuple[str, ...]]
    """Further columns by name, such as ``label``, ``modality``, ``site``."""

    @staticmethod
    def of(version: str, rows: RowSet, columns: Mapping[str, Any]) -> Scores:
        """Returns scores from the columns of ``joined``: values become floats, all else text."""
        values = [math.nan if value is None else float(value) for value in columns["value"]]
        others = {name: tuple(map(str, column)) for name, column in columns.items() if name not in ("value", "cluster")}
        return Scores(
            version=version,
            rows=rows,
            value=tuple(value if math.isfinite(value) else None for value in values),
            cluster=tuple(map(str, columns.get("cluster", ()))),
            columns=others,
        )

    @property
    def array(self) -> Floats:
        return np.array(self.value, dtype=np.float64)

    @property
    def invalid(self) -> str:
        """Describes the rows without a finite value; empty for none."""
        count = sum(value is None for value in self.value)
        rows = f"{count:,} of {len(self.value):,} {self.rows} rows"
        return f"Version {self.version} has no finite value on {rows}" if count else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayScores:
    """``scores.json``: the scores that a day's gate compares."""

    schema_version: int = 2
    scores: tuple[Scores, ...]
    """Scores of the challenger, the champion and the anchor, on frozen and on fresh rows."""

    def find(self, version: str | None, rows: RowSet) -> Scores | None:
        """Returns the scores of a version on a set; None if they are missing or empty."""
        return next((each for each in self.scores if (each.version, each.rows) == (version, rows) and each.value), None)

    def mean_values(self, version: str) -> dict[str, float]:
        """Returns a version's mean value on each set, without values that are not finite."""
        own = {each.rows: each.array for each in self.scores if each.version == version and each.value}
        return {rows: float(np.nanmean(values)) for rows, values in own.items() if np.isfinite(values).any()}


def joined(batches: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Joins the results of ``score(model, batch)`` over batches; columns are lists, arrays or tensors on the host."""
    columns: dict[str, list[Any]] = {}
    for number, batch in enumerate(batches):
        if number and batch.keys() != columns.keys():
            raise ValueError(
                f"score() returned {sorted(batch)} for batch {number} and {sorted(columns)} before; "
                "return the same columns for every batch"
            )
        for name, column in batch.items():
            columns.setdefault(name, []).extend(column.tolist() if hasattr(column, "tolist") else column)
    return columns


# The bootstrap.


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Challenger and another version on the same rows; larger values are better."""

    name: str
    """``frozen``, ``anchor``, ``fresh``, or a slice, such as ``site=north``."""
    against: str
    """The compared version, such as ``0041``."""
    num_rows: int
    num_clusters: int
    old: float
    new: float
    difference: float
    """``new - old``."""
    low: float
    """Lower end of the interval of the difference, at the gate's confidence."""
    high: float
    limit: float
    """Limit of the lower end, below 0: minus the margin times the set's factor."""
    counts: bool
    """True if the verdict depends on it; slices and few fresh rows are shown only."""
    passed: bool
    """True if the lower end is above the limit; a slice also passes if its upper end is not below 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """Two versions' values on the rows on which both have one."""

    against: str
    old: Floats
    new: Floats
    cluster: NDArray[np.int64]
    columns: Mapping[str, NDArray[np.str_]]

    def only(self, rows: NDArray[np.bool_]) -> Pair:
        columns = {name: column[rows] for name, column in self.columns.items()}
        return replace(self, old=self.old[rows], new=self.new[rows], cluster=self.cluster[rows], columns=columns)


def paired(new: Scores, old: Scores) -> Pair:
    """Returns the rows on which both versions have a value."""
    if (len(new.value), new.cluster, new.columns) != (len(old.value), old.cluster, old.columns):
        raise MosaicError(
            f"score returned other clusters or columns for version {old.version} than for {new.version} on the same "
            f"{new.rows} rows; compute all columns but value from the batch alone"
        )
    pair = Pair(
        against=old.version,
        old=old.array,
        new=new.array,
        cluster=np.unique(new.cluster, return_inverse=True)[1] if new.cluster else np.arange(len(new.value)),
        columns={name: np.array(column, dtype=np.str_) for name, column in new.columns.items()},
    )
    return pair.only(np.isfinite(pair.old) & np.isfinite(pair.new))


def compare(name: str, pair: Pair, limit: float, settings: GateSettings, *, counts: bool = True) -> Comparison:
    """Compares two versions on at least one row; passes if the lower end of the difference is above ``limit``."""
    sizes, sums = _clusters(pair.new - pair.old, pair.cluster)
    order = np.lexsort((sums, sizes))
    whole = math.sqrt(math.fsum(pair.old**2) / len(pair.old))
    worth = 1 + (len(pair.old) / len(sizes) - 1) * intraclass_correlation(pair)
    rows = np.concatenate([sizes[order], [worth, worth, 1.0]])
    gains = np.concatenate([sums[order], [whole * worth, -whole * worth, 0.0]])
    batches, size = [], max(1, MAX_WEIGHTS // len(rows))
    for first in range(0, settings.resamples, size):
        weights = _weights(len(rows), first, min(size, settings.resamples - first))
        batches.append((weights @ gains, weights @ rows, whole * weights[:, -1]))
    total, count, one_row = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    lows, highs = np.sort((total - one_row) / count), np.sort((total + one_row) / count)
    tail = _tail(settings.confidence, float(np.sum(sizes) ** 2 / np.sum(sizes**2)))
    rank = max(math.floor(tail * (len(lows) + 1)) - 1, 0)
    return Comparison(
        name=name,
        against=pair.against,
        num_rows=len(pair.old),
        num_clusters=len(sizes),
        old=math.fsum(pair.old) / len(pair.old),
        new=math.fsum(pair.new) / len(pair.new),
        difference=math.fsum(sums) / len(pair.old),
        low=float(lows[rank]),
        high=float(highs[-1 - rank]),
        limit=limit,
        counts=counts,
        passed=float(lows[rank]) > limit,
    )


def intraclass_correlation(pair: Pair) -> float:
    """Returns the intraclass correlation of the old values from analysis of variance, 0 to 1."""
    rows = len(pair.old)
    values = pair.old - math.fsum(pair.old) / rows
    sizes, sums = _clusters(values, pair.cluster)
    number = len(sizes)
    if number in (1, rows):
        return float(number < rows)
    between = math.fsum(sums**2 / sizes)
    within = (math.fsum(values**2) - between) / (rows - number)
    between /= number - 1
    usual = (rows - float(np.sum(sizes**2)) / rows) / (number - 1)
    total = between + (usual - 1) * within
    return min(1.0, max(0.0, (between - within) / total)) if total > 0 else 0.0


def _tail(confidence: float, clusters: float) -> float:
    """Returns the share of resampled means below a bound, for a number of clusters of equal size."""
    from scipy.special import stdtrit

    if clusters <= 1:
        return 0.0
    return NormalDist().cdf(-float(stdtrit(clusters - 1, confidence)) * math.sqrt(clusters / (clusters - 1)))


def _clusters(values: Floats, cluster: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Returns the rows and the sum of values of each cluster, independent of the order of rows."""
    order = np.lexsort((values, cluster))
    starts = np.flatnonzero(np.diff(cluster[order], prepend=-1))
    sizes = np.diff(starts, append=len(order)).astype(np.float64)
    return sizes, np.add.reduceat(values[order], starts)


@lru_cache(maxsize=3)  # a day compares several pairs on the same rows
def _weights(clusters: int, first: int, count: int) -> Floats:
    """Returns the count of each cluster in ``count`` resamples from the ``first`` on."""
    draws = np.random.default_rng((0, first)).integers(0, clusters, size=(count, clusters))
    draws += np.arange(count)[:, None] * clusters
    return np.bincount(draws.ravel(), minlength=count * clusters).reshape(count, clusters).astype(np.float64)


# The decision.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """``facts.json``: measurements of a challenger's export."""

    invalid_tensors: tuple[str, ...] = ()
    """Names of weights and buffers with values that are not finite."""
    export_difference: float | None = None
    """Largest difference between outputs of the model and of its reloaded export; None if it was not reloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The versions of a decision, and the facts beside their scores."""

    challenger: str
    champion: str | None
    anchor: str | None
    facts: ModelFacts
    folder: str = "FOLDER"
    """The retraining folder, as on a command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A check beside the comparisons: validity, today's data."""

    name: str
    """Name, such as ``finite``, ``export``, ``size``, ``latency``, ``labels``, ``modalities``, ``champion's error``."""
    passed: bool
    sentence: str
    """The value, the rule, and after a failure the way out."""

    @staticmethod
    def of(name: str, passed: bool, sentence: str, remedy: str = "") -> Finding:
        """Makes a finding whose sentence has the way out after a failure."""
        return Finding(name=name, passed=passed, sentence=f"{sentence}{'' if passed else remedy}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """``gate.json``: the result of the gate."""

    schema_version: int = 1
    passes: bool
    reason: str
    todo: str
    """Task of a person; empty for none."""
    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    margin: float
    """In units of the score."""
    confidence: float


def decide(scores: DayScores, contest: Contest, settings: GateSettings) -> GateResult:
    """Judges a challenger; the same scores give the same result.

    All of these must hold: it is valid; on the frozen rows it loses no more than the margin against the champion, and
    no more than some margins against the anchor; on fresh rows it is not inferior. Fresh rows, whose labels may be
    wrong, never promote by themselves. Slices are shown.
    """
    findings = (*_validity(contest.facts), *_score_findings(scores, contest, settings))
    broken = [finding for finding in findings if not finding.passed]
    comparisons = () if broken else tuple(_comparisons(scores, contest, settings))
    failed = [comparison for comparison in comparisons if comparison.counts and not comparison.passed]
    passes = not broken and not failed
    if passes:
        reason = _why_promoted(comparisons, contest)
    else:
        reason = broken[0].sentence if broken else _why_refused(failed[0], contest.challenger)
        if others := len(broken) + len(failed) - 1:
            reason = f"{reason.removesuffix('.')}; {others} more did not pass."
    return GateResult(
        passes=passes,
        reason=reason,
        todo=_todo(comparisons, contest) if passes else "",
        comparisons=comparisons,
        findings=findings,
        margin=settings.margin,
        confidence=settings.confidence,
    )


def margin_finding(scores: Scores, settings: GateSettings) -> Finding:
    """Checks that a model with the champion's own scores would pass on these frozen rows."""
    equal = compare("frozen", paired(scores, scores), -settings.margin, settings)
    sentence = (
        f"{equal.num_rows:,} frozen rows in {equal.num_clusters:,} clusters show losses from {0 - equal.low:.2g} on, "
        f"and margin = {settings.margin:g}"
    )
    remedy = ": raise the margin above that, or bring more rows, of more clusters"
    return Finding.of("margin", equal.passed, sentence, remedy)


def _validity(facts: ModelFacts) -> Iterator[Finding]:
    """Checks the export: finite and exact."""
    names, sentence = facts.invalid_tensors, "All weights and buffers are finite"
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        sentence = f"{names[0]}{more} has values that are not finite; look at the loss in metrics.jsonl"
    yield Finding.of("finite", not names, sentence)
    if (difference := facts.export_difference) is not None:  # NaN is not equal
        sentence = "The export, read back, gives equal outputs"
        if difference != 0:
            sentence = (
                f"The export, read back, gives outputs that differ by {difference:.3g}; look for state that is neither "
                "a parameter nor a buffer"
            )
        yield Finding.of("export", difference == 0, sentence)


def _score_findings(scores: DayScores, contest: Contest, settings: GateSettings) -> Iterator[Finding]:
    for each in scores.scores:
        if each.version == contest.challenger and each.invalid:
            yield Finding.of("finite scores", False, f"{each.invalid}; look at what score returns for them")
        elif each.invalid and each.rows == "frozen":
            some = bool(np.isfinite(each.array).any())
            remedy = "; they are left out" if some else "; look at it, and promote another version by hand"
            yield Finding.of("rows left out", some, each.invalid + remedy)
    if scores.find(contest.challenger, "frozen") is None:
        sentence = "There are no frozen rows to judge by; put rows into the recipe's frozen folder"
        yield Finding.of("frozen rows", False, sentence)
    elif (least := settings.min_value) is not None:
        value = scores.mean_values(contest.challenger).get("frozen", math.nan)
        sentence = f"The mean value on the frozen rows is {value:.4f}, and the least is min_value = {least:g}"
        yield Finding.of("min_value", value >= least, sentence)


def _comparisons(scores: DayScores, contest: Contest, settings: GateSettings) -> Iterator[Comparison]:
    """Compares on all sets; what is only shown passes unless it is worse beyond chance and may exceed the margin."""
    margin = settings.margin
    frozen = _pair(scores, contest, contest.champion, "frozen")
    anchor = _pair(scores, contest, contest.anchor, "frozen")
    fresh = _pair(scores, contest, contest.champion, "fresh")
    if frozen is not None:
        yield compare("frozen", frozen, -margin, settings)
    if anchor is not None:
        yield compare("anchor", anchor, -settings.anchor_margins * margin, settings)
    if fresh is not None and len(fresh.old):
        counts = len(fresh.old) >= settings.min_fresh_rows
        comparison = compare("fresh", fresh, -settings.fresh_margins * margin, settings, counts=counts)
        yield replace(comparison, passed=comparison.passed or (not counts and comparison.high >= 0))
    if frozen is None:
        return
    for column in settings.slices:
        if column not in frozen.columns:
            names = ", ".join(sorted(frozen.columns))
            raise MosaicError(f"[gate] slices names {column!r}, and score returns {names}; name one of these")
        for value in np.unique(frozen.columns[column]):
            part = frozen.only(frozen.columns[column] == value)
            comparison = compare(f"{column}={value}", part, -margin, settings, counts=False)
            yield replace(comparison, passed=comparison.passed or comparison.high >= 0)


def _pair(scores: DayScores, contest: Contest, against: str | None, rows: RowSet) -> Pair | None:
    new = scores.find(contest.challenger, rows)
    if new is None or against is None:
        return None
    if (old := scores.find(against, rows)) is None:
        raise MosaicError(f"version {against} was not scored on the {rows} rows that {new.version} was scored on")
    return paired(new, old)


def _why_promoted(comparisons: tuple[Comparison, ...], contest: Contest) -> str:
    new = contest.challenger
    frozen = next((comparison for comparison in comparisons if comparison.name == "frozen"), None)
    if frozen is None:
        against = f" against the anchor {contest.anchor}" if contest.anchor is not None else ""
        return f"There was no champion yet, and {new} passes every check{against}."
    old, within = frozen.against, f"{-frozen.limit:g}"
    better = f"better than {old}" if frozen.low > 0 else f"as good as {old} within {within}"
    return (
        f"{new} is {better}: {frozen.difference:+.4f}, at least {frozen.low:+.4f} on {frozen.num_rows:,} frozen rows."
    )


def _why_refused(comparison: Comparison, challenger: str) -> str:
    where = {"frozen": "on the frozen rows", "fresh": "on the day's fresh rows", "anchor": "(the anchor)"}
    kind = "is worse than" if comparison.high < 0 else "cannot be shown to be as good as"
    return (
        f"{challenger} {kind} {comparison.against} {where[comparison.name]}: {comparison.new:.4f} after "
        f"{comparison.old:.4f}, which may be a loss of {-comparison.low:.4f}; {-comparison.limit:.4g} is allowed."
    )


def _todo(comparisons: tuple[Comparison, ...], contest: Contest) -> str:
    todo = []
    if worse := [each.name for each in comparisons if not (each.counts or each.passed or each.name == "fresh")]:
        todo.append(f"It is worse on {', '.join(worse[:3])}: look at these rows, or go back.")
    if contest.anchor is None:
        todo.append(
            "No version is approved as the anchor, so small losses can add up day by day: look at "
            f"{contest.challenger}, then mosaic retrain promote {contest.folder} {contest.challenger}."
        )
    return " ".join(todo)
