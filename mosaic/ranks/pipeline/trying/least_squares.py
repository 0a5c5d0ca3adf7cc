"""Least squares with coefficients of 0 or more."""

from __future__ import annotations

from collections.abc import Sequence

MAX_SWEEPS = 2000
TOLERANCE = 1e-9
"""Of the largest coefficient: smaller changes in a sweep end it."""


def fit_above_zero(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Returns coefficients of 0 or more for which the rows' sums come near values above 0.

    An error counts in proportion to the root of its value, as spreads of measured times grow. One coefficient after the
    other is set to its best (coordinate descent), from 0: where several columns say the same, the first one is used.
    """
    count = len(rows[0])
    products = [[sum(row[i] * row[j] / value for row, value in zip(rows, values, strict=True)) for j in range(count)]
                for i in range(count)]  # fmt: skip
    targets = [sum(row[i] for row in rows) for i in range(count)]
    found = [0.0] * count
    for _ in range(MAX_SWEEPS):
        largest = 0.0
        for i in range(count):
            if products[i][i] <= 0.0:
                continue
            rest = sum(products[i][j] * found[j] for j in range(count)) - targets[i]
            new = max(0.0, found[i] - rest / products[i][i])
            largest, found[i] = max(largest, abs(new - found[i])), new
        if largest <= TOLERANCE * max(found):
            break
    return found
