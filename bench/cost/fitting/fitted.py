"""Interference fitted on a device, used for every model on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bench.cost.fitting.fit import fit_additive, fit_full, fit_leveling, fit_ours, fit_pairwise
from bench.cost.fitting.group import GroupSample
from bench.cost.fitting.leveling_fit import why_not_leveled
from bench.cost.fitting.observation import ObservationTable, observe
from mosaic.cost import CostModel
from mosaic.cost.interference import FORMS, Coefficients, HasBandwidth, Interference, Leveling, Sharing
from mosaic.errors import InvalidProfileError
from mosaic.profile import Phase, Profile

FITS: Mapping[str, Callable[[ObservationTable], Coefficients]] = MappingProxyType(
    {"additive": fit_additive, "full": fit_full, "pairwise": fit_pairwise, "ours": fit_ours}
)
"""By form, what makes its coefficients of one phase; ``ours`` may find that the pairwise form predicts as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceFit:
    """Interference of a device in one form."""

    form: str
    """Which form of the table."""
    coefficients: Mapping[Phase, Coefficients]
    """Of both phases; a phase that was not measured has those of the other."""

    def interference(self, bandwidths: HasBandwidth) -> Interference:
        """Returns the form for a model whose modules use the given bandwidths."""
        return FORMS[self.form].make((), self.coefficients, bandwidths)

    def cost(self, profile: Profile, bandwidths: HasBandwidth | None = None) -> CostModel:
        """Returns the cost model of a profile; ``bandwidths`` stand in where it has none."""
        return CostModel.from_profile(
            profile, interference=self.form, coefficients=self.coefficients, estimate=bandwidths
        )


NO_INTERFERENCE = InterferenceFit(form="none", coefficients=MappingProxyType({}))
"""The form that has nothing to fit."""


def fit_interference(groups: Iterable[GroupSample], bandwidths: HasBandwidth, form: str) -> InterferenceFit:
    """Fits one form of interference to modules that ran side by side, each phase by itself.

    Args:
        groups: What ran; of any models.
        bandwidths: What their modules use alone.
        form: One of ``FITS``.

    Raises:
        InvalidProfileError: There are no groups, too few, or groups that are too much alike; says what to measure.
        ValueError: A bandwidth is not known at a quota.
    """
    seen = observe(groups, bandwidths)
    by_phase = {phase: [o for o in seen if o.phase is phase] for phase in Phase}
    tables = {phase: ObservationTable.of(found) for phase, found in by_phase.items() if found}
    if not tables:
        raise InvalidProfileError("no modules were measured side by side; measure groups before fitting interference")
    fitted = _fit_phases(form, tables)
    first = next(iter(fitted.values()))
    coefficients = {phase: fitted.get(phase, first) for phase in Phase}
    if form == "ours" and isinstance(first, Sharing):
        form = "pairwise"
    return InterferenceFit(form=form, coefficients=coefficients)


def _fit_phases(form: str, tables: Mapping[Phase, ObservationTable]) -> dict[Phase, Coefficients]:
    """Fits each phase; where our form came out in two kinds, both get the one that bends if it can be had."""
    found = {phase: FITS[form](table) for phase, table in tables.items()}
    if len({type(one) for one in found.values()}) == 1:
        return found
    if any(why_not_leveled(table) for table in tables.values()):
        return {p: one if isinstance(one, Sharing) else fit_pairwise(tables[p]) for p, one in found.items()}
    return {p: one if isinstance(one, Leveling) else fit_leveling(tables[p]) for p, one in found.items()}
