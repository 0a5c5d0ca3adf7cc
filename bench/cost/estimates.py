"""What samples come to: coefficients by least squares within bounds, and figures that are means."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.record import MAX_SAMPLES, Figure, Source, missing_figure

Vector = NDArray[np.float64]

_STEP = 1e-4
_GAIN = 1e-5  # share of the loss below which a step is the last
_TINY = 1e-12


def damped(
    residuals: Callable[[Vector], Vector], start: Vector, low: Vector, high: Vector, *, steps: int = 40
) -> tuple[Vector, float]:
    """Returns a local minimum of the sum of squared residuals within bounds, and that sum (Levenberg, Marquardt).

    Slopes are differences. A coefficient that lies at a bound and would leave it is held.

    Args:
        residuals: From coefficients to what is to become small.
        start: First guess.
        low: Least of each coefficient.
        high: Most of each.
        steps: Most steps.
    """
    here, damping = np.clip(start, low, high), 1e-2
    left = residuals(here)
    cost = float(left @ left)
    for _ in range(steps):
        slopes = _slopes(residuals, here, left, high)
        curvature, gradient = slopes.T @ slopes, slopes.T @ left
        free = ~(((here <= low) & (gradient > 0)) | ((here >= high) & (gradient < 0)))
        before = cost
        for _ in range(8):
            step = np.zeros_like(here)
            inner = curvature[np.ix_(free, free)]
            step[free] = -np.linalg.lstsq(inner + damping * np.diag(np.diag(inner) + _TINY), gradient[free])[0]
            trial = np.clip(here + step, low, high)
            found = residuals(trial)
            if float(found @ found) < cost:
                here, left, cost, damping = trial, found, float(found @ found), damping / 5
                break
            damping *= 4
        if cost >= before * (1 - _GAIN):
            break
    return here, cost


def _slopes(residuals: Callable[[Vector], Vector], here: Vector, left: Vector, high: Vector) -> Vector:
    columns = []
    for place in range(len(here)):
        moved = here.copy()
        moved[place] += _STEP if here[place] + _STEP <= high[place] else -_STEP
        columns.append((residuals(moved) - left) / (moved[place] - here[place]))
    slopes: Vector = np.stack(columns, axis=1)
    return slopes


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
