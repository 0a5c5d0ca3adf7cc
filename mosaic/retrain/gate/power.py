"""The power of a set of rows: the chance that an equally good model passes."""

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
    """Resolution of a set of rows between two versions."""

    standard_error: float
    """Standard error of the mean difference of two equal models."""
    one_row: float
    """Change of the mean by a row that is a whole value worse, which widens the bounds."""
    num_rows: int
    """Rows of the set."""
    num_clusters: int
    """Groups of rows."""
    effective_clusters: float
    """Groups of equal size with the same information."""
    source: str
    """Source of the error, as the end of a sentence."""

    def power(self, loss: float, confidence: float) -> float:
        """Returns the chance that an equal model passes with at most ``loss``."""
        bound = expanded(confidence, self.effective_clusters)
        if self.standard_error == 0 or math.isinf(bound):
            return float(not math.isinf(bound))
        return NORMAL.cdf((loss - self.one_row) / self.standard_error - bound)

    def resolved(self, power: float, confidence: float) -> float:
        """Returns the smallest loss at which an equal model passes with this chance."""
        bound = expanded(confidence, self.effective_clusters) + NORMAL.inv_cdf(min(max(power, 0.001), 0.999))
        return self.one_row + self.standard_error * bound


def resolution(scores: Scores, settings: GateSettings, *, last: Scores | None = None) -> Resolution:
    """Returns the resolution of a set of rows before a challenger exists.

    Args:
        scores: The champion's scores on the frozen rows.
        settings: Settings, with the flip rate to assume without a second version.
        last: Another version's scores on the same rows, such as the last challenger's: the two estimate how much
            equal models differ by row.
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


def resolution_of(resampled: Resampled, num_rows: int) -> Resolution:
    """Returns the resolution of a set of rows from two versions' scores."""
    return Resolution(
        standard_error=resampled.standard_error,
        one_row=resampled.one_row,
        num_rows=num_rows,
        num_clusters=resampled.num_clusters,
        effective_clusters=resampled.effective_clusters,
        source="as the last two versions differ",
    )


def resolution_finding(resolution: Resolution, settings: GateSettings) -> Finding:
    """Checks that the frozen rows resolve the margin; ``check`` and ``run`` stop if they do not."""
    power = resolution.power(settings.margin, settings.confidence)
    needed = resolution.resolved(settings.min_power, settings.confidence)
    sentence = (
        f"An equal model passes {power:.0%} of days at margin = {settings.margin:g} on {_set(resolution)}, "
        f"{resolution.source}, and a model that lost the margin on at most {1 - settings.confidence:.0%}; "
        f"the rule is min_power = {settings.min_power:.0%}"
    )
    if power >= settings.min_power:
        return Finding(name="power", passed=True, sentence=f"{sentence}.")
    more = (
        math.ceil(resolution.num_rows * (needed / settings.margin) ** 2 / 100) * 100 if math.isfinite(needed) else None
    )
    ways = f"set margin = {_rounded_up(needed):.2g}, or bring" if math.isfinite(needed) else "bring"
    rows = f"about {more:,} rows in groups like these" if more is not None else "rows of more groups"
    return Finding(name="power", passed=False, sentence=f"{sentence}: {ways} {rows}.")


def _rounded_up(value: float) -> float:
    """Rounds a positive number up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


def _set(resolution: Resolution) -> str:
    groups = f" in {resolution.num_clusters:,} groups" if resolution.num_clusters != resolution.num_rows else ""
    return f"{resolution.num_rows:,} frozen rows{groups}"
