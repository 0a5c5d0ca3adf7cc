"""Small least-squares problems: coefficients that may not be negative, and curved ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_SMALL = 1e-12
_STEP = 1e-4
_GAIN = 1e-4


def nonnegative(rows: Matrix, values: Matrix) -> Matrix:
    """Returns the coefficients, none below zero, with the least sum of squared residuals (Lawson and Hanson, 1974).

    Args:
        rows: One row an observation, one column a coefficient.
        values: What was observed.
    """
    size = rows.shape[1]
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    found = np.zeros(size)
    active = np.zeros(size, dtype=bool)
    tolerance = _SMALL * max(1.0, float(np.linalg.norm(values)))
    for _ in range(10 * size):
        gradient = np.where(active, -np.inf, scaled.T @ (values - scaled @ found))
        if active.all() or gradient.max() <= tolerance:
            break
        active[int(gradient.argmax())] = True
        trial = _solve(scaled, values, active)
        while (trial[active] <= 0).any():
            # Back to where the first coefficient meets zero; it leaves.
            falling = active & (trial <= 0)
            step = float((found[falling] / (found[falling] - trial[falling] + _SMALL)).min())
            found = found + step * (trial - found)
            active &= found > _SMALL
            found[~active] = 0.0
            trial = _solve(scaled, values, active)
        found = trial
    result: Matrix = found / scale
    return result


def condition_number(rows: Matrix) -> float:
    """Returns how far the columns are from telling their coefficients apart; 1 is best, infinite means that none can.

    Columns are scaled to one length first, so units do not matter.
    """
    lengths = np.linalg.norm(rows, axis=0)
    if rows.shape[0] < rows.shape[1] or (lengths == 0).any():
        return math.inf
    singular = np.linalg.svd(rows / lengths, compute_uv=False)
    return float(singular[0] / singular[-1]) if singular[-1] > _SMALL else math.inf


def damped(
    residuals: Callable[[Matrix], Matrix], start: Matrix, low: Matrix, high: Matrix, *, steps: int = 40
) -> tuple[Matrix, float]:
    """Returns a local minimum of the sum of squared residuals within bounds, and that sum (Levenberg, Marquardt).

    Steps of coefficients that lie at a bound and would leave it are held at zero.

    Args:
        residuals: From guesses of shape (guesses, coefficients) to shape (guesses, observations).
        start: First guess, within the bounds.
        low: Least of each coefficient.
        high: Most of each.
        steps: Most steps.
    """
    here, damping = start, 1e-2
    left = residuals(here[None])[0]
    cost = float(left @ left)
    for _ in range(steps):
        slopes = jacobian(residuals, here, left, high)
        curvature, gradient = slopes.T @ slopes, slopes.T @ left
        free = ~(((here <= low) & (gradient > 0)) | ((here >= high) & (gradient < 0)))
        before = cost
        for _ in range(8):
            step = np.zeros_like(here)
            if free.any():
                inner = curvature[np.ix_(free, free)]
                step[free] = -np.linalg.lstsq(
                    inner + damping * np.diag(np.diag(inner) + _SMALL), gradient[free], rcond=None
                )[0]
            trial = np.clip(here + step, low, high)
            found = residuals(trial[None])[0]
            if float(found @ found) < cost:
                here, left, cost, damping = trial, found, float(found @ found), damping / 5
                break
            damping *= 4
        if cost > before * (1 - _GAIN):
            break
    return here, cost


def jacobian(residuals: Callable[[Matrix], Matrix], at: Matrix, left: Matrix, high: Matrix) -> Matrix:
    """Returns slopes of residuals, by differences within the upper bounds; shape (observations, coefficients).

    Args:
        residuals: See ``damped``.
        at: Where.
        left: The residuals there.
        high: Upper bounds.
    """
    steps = np.where(at + _STEP <= high, _STEP, -_STEP)
    slopes: Matrix = ((residuals(at + np.diag(steps)) - left) / steps[:, None]).T
    return slopes


def _solve(rows: Matrix, values: Matrix, active: NDArray[np.bool_]) -> Matrix:
    found = np.zeros(rows.shape[1])
    if active.any():
        found[active] = np.linalg.lstsq(rows[:, active], values, rcond=None)[0]
    return found
