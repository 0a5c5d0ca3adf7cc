"""Finding the coefficients of interference from modules that ran side by side (paper section 3.3, Eq. 8).

Eq. 8 and the pairwise form are linear in their coefficients, so a fit is least squares with the coefficients that may
not be negative kept so; our form bends (``mosaic.cost.interference.fitting.leveling_fit``). What a form is worth is judged by groups that it
has not seen: groups are left out, everything (also whether ours is worth more than the pairwise one) is decided from
the rest, and the times of those left out are predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mosaic.cost.interference.fitting.least_squares import Matrix, condition_number, half_widths, nonnegative
from mosaic.cost.interference.fitting.leveling_fit import Leveled, fit_leveled, why_not_leveled
from mosaic.cost.interference.fitting.observation import Table
from mosaic.errors import InvalidProfileError

Form = Literal["none", "additive", "full", "pairwise", "leveled", "mosaic"]
"""No interference; Eq. 8 without and with its product; a form that simply adds up over neighbours, which every solver
can state; bandwidth that runs out and is shared; and our own: the last, or the pairwise one where cross-validation does
not find it worth more."""

MOST_CONDITION = 300.0
"""Columns closer to each other than this cannot be told apart with measurements that are good to a percent."""

_EARNED = 0.9  # a form that CP-SAT cannot state linearly has to be a tenth better
_FOLDS = 5
_MOST_LEFT_OUT = 8  # groups, or as many sets of them, that are left out in turn of a form that is slow to fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A form as columns of a least-squares problem."""

    names: tuple[str, ...] = ()
    """Its coefficients; columns of ``Table`` with the same name."""
    is_share: bool = False
    """Whether it predicts shares of the time alone, or milliseconds."""

    @property
    def is_free(self) -> tuple[bool, ...]:
        """Whether each coefficient may be negative."""
        return tuple(name == "e1" for name in self.names)

    def rows(self, seen: Table) -> Matrix:
        """Returns one row an observation."""
        if not self.names:
            return np.zeros((len(seen), 0))
        return np.column_stack([seen.column(name) for name in self.names])

    def values(self, seen: Table) -> Matrix:
        """Returns what the rows should add up to."""
        return seen.extra_ms / seen.alone_ms if self.is_share else seen.extra_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Coefficients of one form."""

    terms: Terms
    """What they belong to."""
    values: tuple[float, ...]
    """One a name."""

    @property
    def named(self) -> dict[str, float]:
        """Coefficients by name."""
        return dict(zip(self.terms.names, self.values, strict=True))

    def extra_ms(self, seen: Table) -> Matrix:
        """Returns the predicted extra times, in milliseconds; Eq. 8 as the paper writes it, but never negative."""
        found: Matrix = (self.terms.rows(seen) @ np.array(self.values)).clip(0)
        return found * seen.alone_ms if self.terms.is_share else found

    def errors(self, seen: Table) -> Matrix:
        """Returns relative errors of the times beside the others."""
        return seen.errors(self.extra_ms(seen))


def fit_terms(seen: Table, form: Form, *, near: Fitted | Leveled | None = None) -> Fitted | Leveled:
    """Fits one form to observations of one phase; ``mosaic`` chooses between two by five-fold cross-validation.

    Args:
        seen: What was measured.
        form: Which form.
        near: A fit of this form to more groups, to start from; changes the time that it takes.

    Raises:
        InvalidProfileError: There are too few groups for the coefficients, or they are too much alike; says what to
            measure more.
    """
    if form == "leveled" or (form == "mosaic" and why_not_leveled(seen) is None):
        leveled = fit_leveled(seen, near=near if isinstance(near, Leveled) else None, intervals=near is None)
        if form == "leveled" or _complaint(_TERMS["pairwise"], seen) is not None:
            return leveled
        pairwise = _folded_errors(seen, lambda part: _solve(_TERMS["pairwise"], part))
        ours = _folded_errors(seen, lambda part: fit_leveled(part, near=leveled))
        if ours <= _EARNED * pairwise:
            return leveled
    terms = _TERMS["pairwise" if form == "mosaic" else form]
    _check_tells(terms, seen)
    return _solve(terms, seen)


def left_out_errors(seen: Table, form: Form, fitted: Fitted | Leveled) -> list[float]:
    """Returns relative errors of the times of groups that were left out, predicted by a fit to all others.

    One group after the other is left out; for our form, which is slow to fit, one of eight sets of groups after the
    other. Groups without which nothing could be fitted are skipped.

    Args:
        seen: What was measured.
        form: Which form.
        fitted: Its fit to all of it, from which fits to parts of it start.
    """
    groups = seen.groups
    sets = min(len(groups), _MOST_LEFT_OUT) if form in ("leveled", "mosaic") else len(groups)
    errors: list[float] = []
    for first in range(sets):
        is_held = np.isin(seen.group, groups[first::sets])
        try:
            again = fit_terms(seen.where(~is_held), form, near=fitted)
        except InvalidProfileError:
            continue
        errors += again.errors(seen.where(is_held)).tolist()
    return errors


def intervals(fitted: Fitted, seen: Table) -> tuple[tuple[float, float], ...]:
    """Returns 95 % t intervals of the coefficients, given their terms; cut at zero where they may not be negative."""
    if not fitted.values:
        return ()
    rows = fitted.terms.rows(seen)
    residuals = fitted.terms.values(seen) - rows @ np.array(fitted.values)
    widths = half_widths(rows, residuals, seen.group.tolist())
    return tuple(
        (value - width if free else max(0.0, value - width), value + width)
        for value, width, free in zip(fitted.values, widths.tolist(), fitted.terms.is_free, strict=True)
    )


def explained(fitted: Fitted | Leveled, seen: Table) -> float:
    """Returns R squared of the extra milliseconds; 1 is perfect, 0 no better than their mean."""
    total = float(((seen.extra_ms - seen.extra_ms.mean()) ** 2).sum())
    left = float(((seen.extra_ms - fitted.extra_ms(seen)) ** 2).sum())
    return 1 - left / total if total > 0 else float(left == 0)


_TERMS: Mapping[str, Terms] = {
    "none": Terms(),
    "additive": Terms(names=("e1", "e2")),
    "full": Terms(names=("e1", "e2", "e3")),
    "pairwise": Terms(names=("pressure", "product"), is_share=True),
}


def _solve(terms: Terms, seen: Table) -> Fitted:
    rows = terms.rows(seen)
    # A coefficient that may be negative is the difference of two that may not.
    free = [index for index, is_free in enumerate(terms.is_free) if is_free]
    found = nonnegative(np.hstack([rows, -rows[:, free]]), terms.values(seen))
    values = found[: len(terms.names)].copy()
    values[free] -= found[len(terms.names) :]
    return Fitted(terms=terms, values=tuple(values.tolist()))


def _folded_errors(seen: Table, fit: Callable[[Table], Fitted | Leveled]) -> float:
    """Mean relative error over folds of whole groups; infinite where there are too few groups for folds."""
    errors: list[float] = []
    for fold in range(min(_FOLDS, len(seen.groups))):
        is_held = np.isin(seen.group, seen.groups[fold::_FOLDS])
        try:
            errors += fit(seen.where(~is_held)).errors(seen.where(is_held)).tolist()
        except InvalidProfileError:
            return math.inf
    return float(np.mean(errors)) if errors else math.inf


def _check_tells(terms: Terms, seen: Table) -> None:
    complaint = _complaint(terms, seen)
    if complaint is not None:
        raise InvalidProfileError(complaint)


def _complaint(terms: Terms, seen: Table) -> str | None:
    """Why these observations cannot tell the coefficients, and what to measure."""
    if not terms.names:
        return None
    groups, names = len(seen.groups), ", ".join(terms.names)
    if groups <= len(terms.names):
        return (
            f"{groups} groups of modules for the coefficients {names}; measure at least "
            f"{len(terms.names) + 1 - groups} more groups side by side"
        )
    condition = condition_number(terms.rows(seen))
    if condition <= MOST_CONDITION:
        return None
    total, sizes = seen.column("e2"), sorted(set(seen.size.tolist()))
    return (
        f"{groups} groups cannot tell {names} apart (condition number {condition:.3g}, at most {MOST_CONDITION:g}): "
        f"they are of {', '.join(map(str, sizes))} modules and use {total.min():.2f} to {total.max():.2f} of the "
        f"bandwidth; measure groups of {sizes[-1] + 1} modules and quotas that use less and more of it"
    )
