"""One comparison of two versions on one set of rows, and slices, which are tested together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mosaic.retrain.gate.bootstrap import Resampled, resample
from mosaic.retrain.gate.power import resolution_of
from mosaic.retrain.gate.scores import Pair
from mosaic.retrain.gate.settings import GateSettings
from mosaic.retrain.records import Comparison

MIN_SLICE_CLUSTERS = 10
"""Least groups of rows of a slice that counts: fewer may all be worse by chance."""


def compare(name: str, pair: Pair, limit: float, settings: GateSettings, *, counts: bool = True) -> Comparison:
    """Compares two versions on at least one row; passes if the lower end of the difference is above ``limit``."""
    return _comparison(name, pair, limit, settings, counts, resample(pair, settings.resamples, settings.seed))


def compare_slices(pair: Pair, limit: float, settings: GateSettings) -> tuple[Comparison, ...]:
    """Compares two versions on every value of the columns ``settings.slices``.

    A slice fails if both hold: its lower end is not above ``limit``, and the challenger is worse there beyond chance
    (p-values of "it is no worse", by Holm over all slices that count, at ``1 - confidence``). The second keeps an
    equal model from being refused because there are many slices.

    Raises:
        ValueError: The scores have no such column.
    """
    resampled_slices = [
        (name, rows, resample(rows, settings.resamples, settings.seed)) for name, rows in _slices(pair, settings)
    ]
    counted = [
        len(rows.old) >= settings.min_slice_rows and resampled.num_clusters >= MIN_SLICE_CLUSTERS
        for _, rows, resampled in resampled_slices
    ]
    chances = [resampled.chance_not_below(0.0) for _, _, resampled in resampled_slices]
    worse = dict(
        zip(
            [index for index, counts in enumerate(counted) if counts],
            holm([chance for chance, counts in zip(chances, counted, strict=True) if counts], 1 - settings.confidence),
            strict=True,
        )
    )
    comparisons = []
    for index, (name, rows, resampled) in enumerate(resampled_slices):
        comparison = _comparison(name, rows, limit, settings, counted[index], resampled)
        is_worse = worse.get(index, chances[index] < 1 - settings.confidence)
        comparisons.append(replace(comparison, passed=comparison.passed or not is_worse))
    return tuple(comparisons)


def holm(chances: Sequence[float], level: float) -> tuple[bool, ...]:
    """Returns the rejected p-values; the chance of any false rejection is at most ``level`` (Holm 1979)."""
    rejected = [False] * len(chances)
    for place, index in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        if chances[index] >= level / (len(chances) - place):
            break
        rejected[index] = True
    return tuple(rejected)


def _slices(pair: Pair, settings: GateSettings) -> Iterator[tuple[str, Pair]]:
    for column in settings.slices:
        if column not in pair.columns:
            raise ValueError(
                f"slices = {list(settings.slices)}: score() returns no column {column!r}; it returns "
                f"{sorted(pair.columns)}"
            )
        for value in np.unique(pair.columns[column]):
            yield f"{column}={value}", pair.only(pair.columns[column] == value)


def _comparison(
    name: str, pair: Pair, limit: float, settings: GateSettings, counts: bool, resampled: Resampled
) -> Comparison:
    low = resampled.low(settings.confidence)
    return Comparison(
        name=name,
        against=pair.against,
        num_rows=len(pair.old),
        num_clusters=resampled.num_clusters,
        old=math.fsum(pair.old) / len(pair.old),
        new=math.fsum(pair.new) / len(pair.new),
        difference=resampled.difference,
        low=low,
        high=resampled.high(settings.confidence),
        limit=limit,
        counts=counts,
        passed=low > limit,
        power=resolution_of(resampled, len(pair.old)).power(-limit, settings.confidence),
    )
