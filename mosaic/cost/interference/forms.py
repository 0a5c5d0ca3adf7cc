"""The table of forms of interference: everything that offers, fits or explains one reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from bench.cost.fitting.fit import Coefficients, fit_additive, fit_full, fit_ours, fit_pairwise
from bench.cost.fitting.observation import ObservationTable

Needs = Literal["nothing", "pairs", "groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceForm:
    """One way to say what neighbours cost."""

    name: str
    """By which it is asked for."""
    says: str
    """What it takes neighbours to cost, in a sentence."""
    needs: Needs
    """What must have been measured: modules side by side in pairs, or in groups with the bandwidth of each alone."""
    fit: Callable[[ObservationTable], Coefficients] | None = None
    """What makes its coefficients of one phase from groups; None where it has none."""
    is_zero_alone: bool = True
    """Whether its equation, as its source writes it, is zero for a module alone; what plans are made with always is."""


_FORMS = (
    InterferenceForm(name="measured", says="what each measured pair lost, added up over neighbours", needs="pairs"),
    InterferenceForm(name="none", says="neighbours cost nothing (the paper's unaware ablation)", needs="nothing"),
    InterferenceForm(
        name="additive",
        says="e1 + e2 sum B milliseconds (the paper's Eq. 8 without its product, its second ablation)",
        needs="groups",
        fit=fit_additive,
        is_zero_alone=False,
    ),
    InterferenceForm(
        name="full",
        says="e1 + e2 sum B + e3 prod B milliseconds (the paper's Eq. 8)",
        needs="groups",
        fit=fit_full,
        is_zero_alone=False,
    ),
    InterferenceForm(
        name="pairwise",
        says="a share of the time alone that adds up over neighbours' B",
        needs="groups",
        fit=fit_pairwise,
    ),
    InterferenceForm(
        name="ours",
        says="bandwidth that runs out and is shared, or the pairwise form where that predicts as well",
        needs="groups",
        fit=fit_ours,
    ),
)

FORMS: Mapping[str, InterferenceForm] = MappingProxyType({form.name: form for form in _FORMS})
"""All forms by name."""


def find_form(name: str) -> InterferenceForm:
    """Returns the form of a name.

    Raises:
        ValueError: There is none; lists the table.
    """
    if name not in FORMS:
        listed = "; ".join(f"{form.name}: {form.says}" for form in FORMS.values())
        raise ValueError(f"interference={name!r} is no form; use one of {listed}")
    return FORMS[name]
