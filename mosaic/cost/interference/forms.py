"""The table of forms of interference: everything that offers, makes or fits one reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mosaic.cost.interference.eq8 import Eq8, FullInterference
from mosaic.cost.interference.leveling import LeveledBandwidth, Leveling
from mosaic.cost.interference.measured import MeasuredInterference
from mosaic.cost.interference.pairwise import SharedBandwidth, Sharing
from mosaic.cost.interference.protocol import HasBandwidth, Interference, NoInterference
from mosaic.profile import PairSample, Phase

Coefficients = Eq8 | Sharing | Leveling


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceForm:
    """One way to say what neighbours cost."""

    name: str
    """By which it is asked for."""
    says: str
    """What it takes neighbours to cost, in a sentence."""
    takes: type[Coefficients] | None = None
    """Coefficients of a phase; None where it has none."""
    make: Callable[[Sequence[PairSample], Mapping[Phase, Any], HasBandwidth], Interference]
    """Makes it of measured pairs, of coefficients of each phase, and of the bandwidths that modules use alone."""


_FORMS = (
    InterferenceForm(
        name="measured",
        says="what each measured pair lost, added up over neighbours",
        make=lambda pairs, _, __: MeasuredInterference(pairs),
    ),
    InterferenceForm(
        name="none",
        says="neighbours cost nothing (the paper's unaware ablation)",
        make=lambda _, __, ___: NoInterference(),
    ),
    InterferenceForm(
        name="additive",
        says="e1 + e2 sum B milliseconds (the paper's Eq. 8 without its product, its second ablation)",
        takes=Eq8,
        make=lambda _, found, bandwidths: FullInterference(found, bandwidths),
    ),
    InterferenceForm(
        name="full",
        says="e1 + e2 sum B + e3 prod B milliseconds (the paper's Eq. 8)",
        takes=Eq8,
        make=lambda _, found, bandwidths: FullInterference(found, bandwidths),
    ),
    InterferenceForm(
        name="pairwise",
        says="a share of the time alone that adds up over neighbours' B",
        takes=Sharing,
        make=lambda _, found, bandwidths: SharedBandwidth(found, bandwidths),
    ),
    InterferenceForm(
        name="ours",
        says="bandwidth that runs out and is shared",
        takes=Leveling,
        make=lambda _, found, bandwidths: LeveledBandwidth(found, bandwidths),
    ),
)

FORMS: Mapping[str, InterferenceForm] = MappingProxyType({form.name: form for form in _FORMS})
"""All forms by name."""


def make_interference(
    name: str, pairs: Sequence[PairSample], coefficients: Mapping[Phase, Coefficients], bandwidths: HasBandwidth
) -> Interference:
    """Returns the interference of a model in a form of the table.

    Args:
        name: Of the form.
        pairs: Measured pairs of its modules.
        coefficients: Of each phase, for a form that has them; a phase without is undisturbed.
        bandwidths: What its modules use alone.

    Raises:
        ValueError: There is no such form (lists the table), or the coefficients are not those of the form.
    """
    form = FORMS.get(name)
    if form is None:
        listed = "; ".join(f"{form.name}: {form.says}" for form in FORMS.values())
        raise ValueError(f"interference={name!r} is no form; use one of {listed}")
    takes = form.takes
    if bool(coefficients) != (takes is not None) or any(type(one) is not takes for one in coefficients.values()):
        found = ", ".join(sorted({type(one).__name__ for one in coefficients.values()})) or "none"
        raise ValueError(
            f"interference={name!r} takes {'no' if takes is None else takes.__name__} coefficients; found {found}"
        )
    return form.make(pairs, coefficients, bandwidths)
