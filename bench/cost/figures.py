"""Figures of ``bench.cost``: means with their raw samples, and figures that cannot be had."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from bench.record import MAX_SAMPLES, Figure, Source, missing_figure


def mean_figure(
    name: str, samples: Sequence[float], *, source: Source, labels: dict[str, str] | None = None, reason: str = ""
) -> Figure:
    """Returns the mean of samples (the paper's *average* error), and a bootstrapped 95 % interval."""
    labels = {"num_samples": str(len(samples)), **(labels or {})}
    if not samples:
        return missing_figure(name, reason or "nothing was measured", labels, source=source)
    dice = np.random.default_rng(0)
    means = np.sort([dice.choice(samples, len(samples)).mean() for _ in range(500)])
    return Figure(
        name=name,
        source=source,
        value=statistics.fmean(samples),
        low=float(means[12]),
        high=float(means[-13]),
        samples=tuple(float(f"{sample:.6g}") for sample in samples[:MAX_SAMPLES]),
        labels=labels,
    )


def absent(names: Iterable[str], reason: object, *, source: Source = "measured") -> list[Figure]:
    """Returns figures that cannot be had."""
    return [replace(missing_figure(name, reason), source=source) for name in names]
