"""Errors of every form of interference on groups that it was neither fitted to nor chosen by."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from bench.cost.figures import absent, mean_figure
from bench.cost.interference.forms import STUDIED, Fitted, StudiedForm, fit_form
from bench.cost.interference.truth import Group, Truth
from bench.record import Figure

CHOSEN = "the form chosen by groups of its own"
ALL_SIZES = "all sizes"


def error_name(head: str, of: str, size: int | str, words: str) -> str:
    """Names the error of a form on a set of groups of one size, or of all."""
    return f"{head}error on {of}, {_size(size)}, {words}"


def slowdown_name(head: str, of: str, size: int | str) -> str:
    """Names the mean slowdown in a set."""
    return f"{head}slowdown in {of}, {_size(size)}"


def again_name(head: str) -> str:
    """Names how far the same groups differ when run twice."""
    return f"{head}difference of the same groups run twice"


def _size(size: int | str) -> str:
    return size if isinstance(size, str) else f"{size} modules"


def group_names(head: str, sets: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of all figures of groups."""
    words = (*(studied.words for studied in STUDIED), CHOSEN)
    found = [again_name(head)]
    for of in sets:
        for size in (*sizes, ALL_SIZES):
            found += [slowdown_name(head, of, size), *(error_name(head, of, size, form) for form in words)]
    return tuple(found)


Fits = tuple[dict[str, Fitted], dict[str, str]]
"""Forms that could be fitted, by their words, and why others have none."""


def fit_forms(truth: Truth) -> Fits:
    """Fits every form; returns the fits by their words, and why others have none."""
    fits: dict[str, Fitted] = {}
    reasons: dict[str, str] = {}
    for studied in STUDIED:
        try:
            fits[studied.words] = fit_form(studied, truth)
        except ValueError as error:
            reasons[studied.words] = str(error)
    return fits, reasons


def choose_form(fits: dict[str, Fitted], truth: Truth) -> str:
    """Returns the words of the form that errs least on the groups to choose by."""
    return min(fits, key=lambda words: statistics.fmean(fits[words].errors(truth, truth.choose)))


def judge_forms(truth: Truth, fitted: Fits, sizes: Sequence[int]) -> Iterator[Figure]:
    """Chooses and judges; every error with the number of coefficients behind it."""
    fits, reasons = fitted
    chosen = choose_form(fits, truth) if truth.choose else ""
    for of, groups in truth.judge.items():
        for size in (*sizes, ALL_SIZES):
            some = [group for group in groups if size in (len(group), ALL_SIZES)]
            slowdowns = [member.beside_ms / member.alone_ms for group in some for member in group]
            yield mean_figure(slowdown_name(truth.head, of, size), slowdowns, source=truth.source)
            for studied in STUDIED:
                yield _error_figure(truth, of, size, studied, fits, reasons, some)
            if chosen:
                labels = {"form": chosen, "coefficients": str(fits[chosen].num_free)}
                errors = fits[chosen].errors(truth, some)
                yield mean_figure(error_name(truth.head, of, size, CHOSEN), errors, source=truth.source, labels=labels)
    first = next(iter(truth.judge.values()), ())
    differences = [
        abs(two.beside_ms / one.beside_ms - 1)
        for before, after in zip(first, truth.again, strict=False)
        for one, two in zip(before, after, strict=True)
    ]
    labels = {"is": "the least error that any form can show here"}
    yield mean_figure(again_name(truth.head), differences, source=truth.source, labels=labels)


def _error_figure(
    truth: Truth,
    of: str,
    size: int | str,
    studied: StudiedForm,
    fits: dict[str, Fitted],
    reasons: dict[str, str],
    groups: Sequence[Group],
) -> Figure:
    name = error_name(truth.head, of, size, studied.words)
    if studied.words not in fits:
        return absent([name], reasons[studied.words], source=truth.source)[0]
    fitted = fits[studied.words]
    labels = {"coefficients": str(fitted.num_free), "form": studied.form}
    return mean_figure(name, fitted.errors(truth, groups), source=truth.source, labels=labels)
