"""Coefficients of one phase from modules that ran side by side (paper section 3.3, Eq. 8).

Eq. 8 and the pairwise form are linear in their coefficients, so a fit is least squares with the coefficients that may
not be negative kept so; our form bends (``leveling_fit``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from bench.cost.fitting.least_squares import Matrix, condition_number, nonnegative
from bench.cost.fitting.leveling_fit import fit_leveled, why_not_leveled
from bench.cost.fitting.observation import ObservationTable
from mosaic.cost.interference.eq8 import Eq8
from mosaic.cost.interference.leveling import Leveling
from mosaic.cost.interference.pairwise import Sharing
from mosaic.errors import InvalidProfileError

MAX_CONDITION = 300.0
"""Columns closer to each other than this cannot be told apart with measurements that are good to a percent."""

_EARNED = 0.9  # a form that CP-SAT cannot state linearly has to be a tenth better
_FOLDS = 5
_PAIRWISE = ("pressure", "product")


def fit_additive(seen: ObservationTable) -> Eq8:
    """Fits Eq. 8 without its product.

    Raises:
        InvalidProfileError: There are too few groups for the coefficients, or they are too much alike; says what to
            measure more.
    """
    return _fit_eq8(seen, ("e1", "e2"))


def fit_full(seen: ObservationTable) -> Eq8:
    """Fits Eq. 8; raises as ``fit_additive`` does."""
    return _fit_eq8(seen, ("e1", "e2", "e3"))


def fit_pairwise(seen: ObservationTable) -> Sharing:
    """Fits the form that adds up over neighbours; raises as ``fit_additive`` does."""
    _check_tells(seen, _PAIRWISE)
    return _solve_pairwise(seen)


def fit_leveling(seen: ObservationTable) -> Leveling:
    """Fits bandwidth that runs out and is shared; raises as ``fit_additive`` does."""
    return fit_leveled(seen).leveling


def fit_ours(seen: ObservationTable) -> Sharing | Leveling:
    """Fits our form: bandwidth that is shared, or the pairwise one where five-fold cross-validation finds it as good.

    Raises as ``fit_additive`` does.
    """
    if why_not_leveled(seen) is not None:
        return fit_pairwise(seen)
    leveled = fit_leveled(seen)
    if _complaint(seen, _PAIRWISE) is not None:
        return leveled.leveling

    def pairwise_ms(rest: ObservationTable, held: ObservationTable) -> Matrix:
        found = _solve_pairwise(rest)
        extra: Matrix = (held.columns(_PAIRWISE) @ np.array([found.pressure, found.product])) * held.alone_ms
        return extra

    def leveled_ms(rest: ObservationTable, held: ObservationTable) -> Matrix:
        return fit_leveled(rest, near=leveled).extra_ms(held)

    if _folded_error(seen, leveled_ms) <= _EARNED * _folded_error(seen, pairwise_ms):
        return leveled.leveling
    return fit_pairwise(seen)


def _fit_eq8(seen: ObservationTable, names: tuple[str, ...]) -> Eq8:
    _check_tells(seen, names)
    rows = seen.columns(names)
    # e1 may be negative, so it is the difference of two that may not.
    found = nonnegative(np.hstack([rows, -rows[:, :1]]), seen.extra_ms).tolist()
    values = [found[0] - found[-1], *found[1:-1]]
    return Eq8(**dict(zip(names, values, strict=True)))


def _solve_pairwise(seen: ObservationTable) -> Sharing:
    pressure, product = nonnegative(seen.columns(_PAIRWISE), seen.extra_ms / seen.alone_ms).tolist()
    return Sharing(pressure=pressure, product=product)


def _folded_error(seen: ObservationTable, predict_ms: Callable[[ObservationTable, ObservationTable], Matrix]) -> float:
    """Mean relative error over folds of whole groups; infinite where there are too few groups for folds."""
    errors: list[float] = []
    for fold in range(min(_FOLDS, len(seen.groups))):
        is_held = np.isin(seen.group, seen.groups[fold::_FOLDS])
        held = seen.where(is_held)
        try:
            errors += held.errors(predict_ms(seen.where(~is_held), held)).tolist()
        except InvalidProfileError:
            return math.inf
    return float(np.mean(errors)) if errors else math.inf


def _check_tells(seen: ObservationTable, names: tuple[str, ...]) -> None:
    complaint = _complaint(seen, names)
    if complaint is not None:
        raise InvalidProfileError(complaint)


def _complaint(seen: ObservationTable, names: tuple[str, ...]) -> str | None:
    """Why these observations cannot tell the coefficients, and what to measure."""
    groups, listed = len(seen.groups), ", ".join(names)
    if groups <= len(names):
        return (
            f"{groups} groups of modules for the coefficients {listed}; measure at least "
            f"{len(names) + 1 - groups} more groups side by side"
        )
    condition = condition_number(seen.columns(names))
    if condition <= MAX_CONDITION:
        return None
    total, sizes = seen.columns(("e2",)), sorted(set(seen.size.tolist()))
    return (
        f"{groups} groups cannot tell {listed} apart (condition number {condition:.3g}, at most {MAX_CONDITION:g}): "
        f"they are of {', '.join(map(str, sizes))} modules and use {total.min():.2f} to {total.max():.2f} of the "
        f"bandwidth; measure groups of {sizes[-1] + 1} modules and quotas that use less and more of it"
    )
