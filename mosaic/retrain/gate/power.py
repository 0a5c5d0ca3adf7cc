"""Whether a set of rows can resolve a margin: the chance that a model which is just as good passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mosaic.retrain.gate.bootstrap import NORMAL, Resampled, alikeness, expanded, resample
from mosaic.retrain.gate.scores import Scores, paired
from mosaic.retrain.gate.settings import GateSettings
from mosaic.retrain.records import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """How finely a set of rows tells two versions apart."""

    standard_error: float
    """Of the mean difference of two equal models."""
    one_row: float
    """What a row that is a whole value worse does to the mean: bounds are that much further out."""
    num_rows: int
    """Rows of the set."""
    num_clusters: int
    """Groups of rows."""
    effective_clusters: float
    """Groups of equal size that would tell as much."""
    source: str
    """Where the error comes from, as the end of a sentence."""

    def power(self, loss: float, confidence: float) -> float:
        """Returns the chance that an equal model is found not to lose more than ``loss``."""
        bound = expanded(confidence, self.effective_clusters)
        if self.standard_error == 0 or math.isinf(bound):
            return float(not math.isinf(bound))
        return NORMAL.cdf((loss - self.one_row) / self.standard_error - bound)

    def resolved(self, power: float, confidence: float) -> float:
        """Returns the smallest loss at which an equal model passes with this chance."""
        bound = expanded(confidence, self.effective_clusters) + NORMAL.inv_cdf(min(max(power, 0.001), 0.999))
        return self.one_row + self.standard_error * bound


def resolution(scores: Scores, settings: GateSettings, *, last: Scores | None = None) -> Resolution:
    """Returns what a set of rows can tell, before a challenger is there.

    Args:
        scores: The champion's, on the frozen rows.
        settings: Has the flip rate that is taken where no second version was scored.
        last: Another version's scores on the same rows, such as the last challenger's: the two tell how much equal
            models differ from row to row.
    """
    if last is not None:
        pair = paired(last, scores)
        return resolution_of(resample(pair, settings.resamples, settings.seed), len(pair.old))
    pair = paired(scores, scores)
    sizes = np.bincount(pair.cluster).astype(np.float64)
    sizes = sizes[sizes > 0]
    whole = math.sqrt(float(np.mean(pair.old**2)))
    alike = alikeness(pair)
    added = 1 + (len(pair.old) / len(sizes) - 1) * alike
    variance = whole**2 * (settings.flip_rate * float(np.sum(sizes * (1 + (sizes - 1) * alike))) + 2 * added**2)
    return Resolution(
        standard_error=math.sqrt(variance) / len(pair.old),
        one_row=whole / len(pair.old),
        num_rows=len(pair.old),
        num_clusters=len(sizes),
        effective_clusters=float(np.sum(sizes) ** 2 / np.sum(sizes**2)),
        source=f"if equal models differ on {settings.flip_rate:.1%} of rows (flip_rate)",
    )


def resolution_of(found: Resampled, num_rows: int) -> Resolution:
    """Returns what a set of rows can tell, from two versions on it."""
    return Resolution(
        standard_error=found.standard_error,
        one_row=found.one_row,
        num_rows=num_rows,
        num_clusters=found.num_clusters,
        effective_clusters=found.effective_clusters,
        source="as the last two versions differ",
    )


def resolution_finding(found: Resolution, settings: GateSettings) -> Finding:
    """Says whether the margin can be resolved by the frozen rows; ``check`` and ``run`` go no further where not."""
    power = found.power(settings.margin, settings.confidence)
    needed = found.resolved(settings.min_power, settings.confidence)
    said = (
        f"An equal model passes {power:.0%} of days at margin = {settings.margin:g} on {_set(found)}, "
        f"{found.source}, and a model that lost the margin on at most {1 - settings.confidence:.0%}; "
        f"the rule is min_power = {settings.min_power:.0%}"
    )
    if power >= settings.min_power:
        return Finding(name="power", passed=True, sentence=f"{said}.")
    more = math.ceil(found.num_rows * (needed / settings.margin) ** 2 / 100) * 100 if math.isfinite(needed) else None
    ways = f"set margin = {_rounded_up(needed):.2g}, or bring" if math.isfinite(needed) else "bring"
    rows = f"about {more:,} rows in groups like these" if more is not None else "rows of more groups"
    return Finding(name="power", passed=False, sentence=f"{said}: {ways} {rows}.")


def _rounded_up(value: float) -> float:
    """Returns a number above 0 with two digits that is not below it."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


def _set(found: Resolution) -> str:
    groups = f" in {found.num_clusters:,} groups" if found.num_clusters != found.num_rows else ""
    return f"{found.num_rows:,} frozen rows{groups}"
