"""Finding the coefficients of interference from modules that ran side by side (paper section 3.3, Eq. 8).

Each form is linear in its coefficients, so a fit is least squares with the coefficients that may not be negative kept
so. What a form is worth is judged by groups that it has not seen: one group after the other is left out,
everything (also which terms our form uses) is decided from the rest, and the times of that group are predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mosaic.cost.least_squares import Matrix, condition_number, half_widths, nonnegative
from mosaic.cost.observation import Table
from mosaic.errors import InvalidProfileError

Form = Literal["none", "additive", "full", "pairwise", "mosaic"]
"""No interference, Eq. 8 without and with its product, and our own form: with the terms that simply add up over
neighbours (which every solver can state), or with those that cross-validation chooses."""

MOST_CONDITION = 300.0
"""Columns closer to each other than this cannot be told apart with measurements that are good to a percent."""

_KNEES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
_EARNED = 0.9  # a form that CP-SAT and the exact search cannot state linearly has to be a tenth better
_FOLDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A form as columns of a least-squares problem."""

    names: tuple[str, ...] = ()
    """Its coefficients; columns of ``Table`` with the same name."""
    is_share: bool = False
    """Whether it predicts shares of the time alone, or milliseconds."""
    knee: float = 1.0
    """See ``Sharing``."""

    @property
    def is_free(self) -> tuple[bool, ...]:
        """Whether each coefficient may be negative."""
        return tuple(name == "e1" for name in self.names)

    def rows(self, seen: Table) -> Matrix:
        """Returns one row an observation."""
        if not self.names:
            return np.zeros((len(seen), 0))
        return np.column_stack([seen.column(name, self.knee) for name in self.names])

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


def fit_terms(seen: Table, form: Form) -> Fitted:
    """Fits one form to observations of one phase; for ours, also chooses its terms by five-fold cross-validation.

    Raises:
        InvalidProfileError: There are too few groups for the coefficients, or they are too much alike; says what to
            measure more.
    """
    if form != "mosaic":
        (terms,) = _CANDIDATES[form]
        _check_tells(terms, seen)
        return _solve(terms, seen)
    usable = {}
    for name in _OURS:
        told = [terms for terms in _CANDIDATES[name] if _complaint(terms, seen) is None]
        if told:
            usable[name] = told
    if not usable:
        _check_tells(_CANDIDATES["pairwise"][0], seen)
    errors = {name: _folded_error(variants, seen) for name, variants in usable.items()}
    best = min(errors, key=errors.__getitem__)
    if "pairwise" in errors and errors[best] > _EARNED * errors["pairwise"]:
        best = "pairwise"
    return _best_of(usable[best], seen)


def left_out_errors(seen: Table, form: Form) -> list[float]:
    """Returns relative errors of the times of each group, predicted by a fit to all others.

    Groups without which nothing could be fitted are skipped.
    """
    errors: list[float] = []
    for group in seen.groups:
        is_held = seen.group == group
        try:
            fitted = fit_terms(seen.where(~is_held), form)
        except InvalidProfileError:
            continue
        errors += fitted.errors(seen.where(is_held)).tolist()
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


def explained(fitted: Fitted, seen: Table) -> float:
    """Returns R squared of the extra milliseconds; 1 is perfect, 0 no better than their mean."""
    total = float(((seen.extra_ms - seen.extra_ms.mean()) ** 2).sum())
    left = float(((seen.extra_ms - fitted.extra_ms(seen)) ** 2).sum())
    return 1 - left / total if total > 0 else float(left == 0)


# Few on purpose: each is a physical story, and a choice among many would fit the noise.
_CANDIDATES: Mapping[str, tuple[Terms, ...]] = {
    "none": (Terms(),),
    "additive": (Terms(names=("e1", "e2")),),
    "full": (Terms(names=("e1", "e2", "e3")),),
    "pairwise": (Terms(names=("pressure", "product"), is_share=True),),
    "excess": tuple(Terms(names=("pressure", "excess"), is_share=True, knee=knee) for knee in _KNEES),
    "bound": tuple(Terms(names=("product", "bound"), is_share=True, knee=knee) for knee in _KNEES),
}
_OURS = ("pairwise", "excess", "bound")


def _solve(terms: Terms, seen: Table) -> Fitted:
    rows = terms.rows(seen)
    # A coefficient that may be negative is the difference of two that may not.
    free = [index for index, is_free in enumerate(terms.is_free) if is_free]
    found = nonnegative(np.hstack([rows, -rows[:, free]]), terms.values(seen))
    values = found[: len(terms.names)].copy()
    values[free] -= found[len(terms.names) :]
    return Fitted(terms=terms, values=tuple(values.tolist()))


def _best_of(variants: Sequence[Terms], seen: Table) -> Fitted:
    return min((_solve(terms, seen) for terms in variants), key=lambda fitted: float(fitted.errors(seen).sum()))


def _folded_error(variants: Sequence[Terms], seen: Table) -> float:
    """Mean relative error over folds of whole groups; infinite where there are too few groups for folds."""
    errors: list[float] = []
    for fold in range(min(_FOLDS, len(seen.groups))):
        is_held = np.isin(seen.group, seen.groups[fold::_FOLDS])
        if not is_held.all():
            fitted = _best_of(variants, seen.where(~is_held))
            errors += fitted.errors(seen.where(is_held)).tolist()
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
    total, sizes = seen.column("e2", 1.0), sorted(set(seen.size.tolist()))
    return (
        f"{groups} groups cannot tell {names} apart (condition number {condition:.3g}, at most {MOST_CONDITION:g}): "
        f"they are of {', '.join(map(str, sizes))} modules and use {total.min():.2f} to {total.max():.2f} of the "
        f"bandwidth; measure groups of {sizes[-1] + 1} modules and quotas that use less and more of it"
    )
