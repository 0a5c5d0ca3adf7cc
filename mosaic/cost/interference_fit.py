"""Coefficients of interference as a file: found once on a device, used for every model on it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, get_args

from mosaic.artifact import Ge
from mosaic.cost.contention import AdditiveInterference, Eq8, FullInterference, HasBandwidth, SharedBandwidth, Sharing
from mosaic.cost.fit import Fitted, Form, explained, fit_terms, intervals, left_out_errors
from mosaic.cost.interference.fitting.leveling_fit import NAMES, Leveled, why_not_leveled
from mosaic.cost.interference.fitting.observation import Table, observe
from mosaic.cost.interference.leveling import LeveledBandwidth, Leveling
from mosaic.cost.interference.measured import Interference, NoInterference
from mosaic.device import FORBID_EXTRA, Device
from mosaic.errors import InvalidProfileError
from mosaic.profile import GroupSample, HeldOutError, PairSample, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One fitted coefficient and how sure it is."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    name: str
    """As in ``Eq8`` (milliseconds), ``Sharing`` (shares of the time alone) or ``Leveling``; or a module's name."""
    value: float
    """The fitted value."""
    low: float | None
    """Lower end of its 95 % interval; None where nothing bounds it."""
    high: float | None
    """Upper end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """What the fitted groups were like; beyond it a fit is a guess."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    least_share: float
    """Least bandwidth that a member used alone, as a share of the device's."""
    most_share: float
    """Most of it."""
    most_total: float
    """Most that a group used together; the sum of its members' shares."""
    most_modules: int
    """Modules of the largest group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFit:
    """The fit of one phase."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    phase: Phase
    """Forward or backward."""
    coefficients: tuple[Coefficient, ...]
    """Of the form; none for ``none``."""
    draws: tuple[Coefficient, ...] = ()
    """Of ``Leveling``: what one slot of each module of the groups can draw. Other modules get the device's ``draw``."""
    r_squared: float
    """Of the extra milliseconds, over the groups that were fitted."""
    held_out: HeldOutError | None
    """Errors of times in groups that were left out; None where there were too few groups to leave one out."""
    held_out_mean: float | None
    """Mean of these errors, the figure of the paper's section 5.3.2."""
    num_samples: Annotated[int, Ge(1)]
    """Members of groups that were fitted."""
    num_groups: Annotated[int, Ge(1)]
    """Groups."""
    domain: Domain
    """What they were like."""

    def __post_init__(self) -> None:
        names = {coefficient.name for coefficient in self.coefficients}
        if (self.draws and not self.is_leveled) or len(names) != len(self.coefficients):
            raise InvalidProfileError(
                f"coefficients {', '.join(of.name for of in self.coefficients)} with {len(self.draws)} draws are of no "
                "form; fit it again"
            )

    @property
    def named(self) -> dict[str, float]:
        """Coefficients by name."""
        return {coefficient.name: coefficient.value for coefficient in self.coefficients}

    @property
    def is_leveled(self) -> bool:
        """Whether the coefficients are those of ``Leveling``, and not of ``Sharing``."""
        return {coefficient.name for coefficient in self.coefficients} == set(NAMES)

    @property
    def leveling(self) -> Leveling:
        """Coefficients as ``Leveling``."""
        return Leveling(**self.named, draws={of.name: of.value for of in self.draws})


_NAMES_OF: Mapping[Form, frozenset[str]] = {
    "none": frozenset(),
    "additive": frozenset({"e1", "e2"}),
    "full": frozenset({"e1", "e2", "e3"}),
    "pairwise": frozenset({"pressure", "product"}),
    "leveled": frozenset(NAMES),
    "mosaic": frozenset(),  # either of the two above
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceFit:
    """Interference of a device in one form."""

    SCHEMA_VERSION: ClassVar[int] = 2
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 2
    """Version of this file's layout."""
    device: Device
    """Where the groups ran."""
    form: Form
    """Which form."""
    phases: tuple[PhaseFit, ...]
    """One or two."""

    def __post_init__(self) -> None:
        if not self.phases or len({fit.is_leveled for fit in self.phases}) > 1:
            raise InvalidProfileError("a fit has one or two phases, all of one form; fit it again")
        missing = {name for fit in self.phases for name in _NAMES_OF[self.form] - fit.named.keys()}
        if missing:
            raise InvalidProfileError(
                f"a fit of the form {self.form!r} lacks the coefficients {', '.join(sorted(missing))}; fit it again"
            )

    @property
    def is_leveled(self) -> bool:
        """Whether its coefficients are those of ``Leveling``."""
        return all(fit.is_leveled for fit in self.phases)

    def of(self, phase: Phase) -> PhaseFit:
        """Returns the fit of a phase, or that of the other where this one was not measured."""
        return next((fit for fit in self.phases if fit.phase is phase), self.phases[0])

    def interference(self, bandwidths: HasBandwidth) -> Interference:
        """Returns the form for a model whose modules use the given bandwidths."""
        if self.form == "none":
            return NoInterference()
        if self.form in ("pairwise", "leveled", "mosaic"):
            return self._ours(bandwidths)
        eq8 = {phase: Eq8(**self.of(phase).named) for phase in Phase}
        kind = FullInterference if self.form == "full" else AdditiveInterference
        return kind(eq8, bandwidths)

    def _ours(self, bandwidths: HasBandwidth) -> Interference:
        fits = {phase: self.of(phase) for phase in Phase}
        if self.is_leveled:
            return LeveledBandwidth({phase: fit.leveling for phase, fit in fits.items()}, bandwidths)
        return SharedBandwidth({phase: Sharing(**fit.named) for phase, fit in fits.items()}, bandwidths)

    def outside(
        self, shares: Mapping[tuple[str, Phase], Sequence[float]], *, device: Device, num_modules: int = 2
    ) -> tuple[str, ...]:
        """Says where a model lies outside what was fitted; nothing where it is covered.

        Args:
            shares: Bandwidths that its modules use alone, by module and phase, at the quotas that may be chosen.
            device: Where it is to run.
            num_modules: Most of them that may share a device.
        """
        findings = []
        if device != self.device:
            findings.append(
                f"interference was fitted on {self.device.name} with {self.device.num_slots} slots, this is "
                f"{device.name} with {device.num_slots}: fit it here"
            )
        unknown = sorted({module for module, _ in shares} - {of.name for fit in self.phases for of in fit.draws})
        if self.is_leveled and unknown:
            findings.append(
                f"no fitted group had {', '.join(unknown)}: what a slot of them draws is taken to be typical of the "
                "device; measure groups with them"
            )
        unmeasured = sorted({phase for _, phase in shares} - {fit.phase for fit in self.phases})
        findings += [f"no group was measured in {phase}; the other phase stands in" for phase in unmeasured]
        for (module, phase), found in shares.items():
            domain = self.of(phase).domain
            low, high = min(found, default=domain.least_share), max(found, default=domain.most_share)
            if low < domain.least_share or high > domain.most_share:
                findings.append(
                    f"{module!r} {phase} uses {low:.2f} to {high:.2f} of the bandwidth; fitted groups had "
                    f"{domain.least_share:.2f} to {domain.most_share:.2f}: measure a group with it"
                )
        most = max(fit.domain.most_modules for fit in self.phases)
        if num_modules > most:
            findings.append(f"{num_modules} modules may share a device; fitted groups had at most {most}")
        return tuple(findings)


def fit_interference(
    groups: Iterable[GroupSample],
    bandwidths: HasBandwidth,
    form: Form,
    *,
    device: Device,
    pairs: Iterable[PairSample] = (),
) -> InterferenceFit:
    """Fits one form of interference to modules that ran side by side, each phase by itself.

    Args:
        groups: What ran; of any models.
        bandwidths: What their modules use alone.
        form: ``none``, ``additive`` or ``full`` (Eq. 8 without and with its product), ``pairwise``, ``leveled``, or
            ``mosaic``, which is one of the last two, chosen by cross-validation.
        device: Where they ran.
        pairs: Pairs of which one was timed.

    Raises:
        InvalidProfileError: There are no groups, too few, or groups that are too much alike; says what to measure.
        ValueError: A bandwidth is not known at a quota.
    """
    seen = observe(groups, bandwidths, pairs=pairs)
    by_phase = {phase: [o for o in seen if o.phase is phase] for phase in Phase}
    tables = {phase: Table.of(found) for phase, found in by_phase.items() if found}
    if not tables:
        raise InvalidProfileError("no modules were measured side by side; measure groups before fitting interference")
    phases = [_fit_phase(table, form, phase) for phase, table in tables.items()]
    if len({fit.is_leveled for fit in phases}) > 1:  # one form for both phases, the one that bends where it can be had
        kind: Form = "pairwise" if any(why_not_leveled(table) for table in tables.values()) else "leveled"
        phases = [
            fit if fit.is_leveled == (kind == "leveled") else _fit_phase(tables[fit.phase], kind, fit.phase)
            for fit in phases
        ]
    return InterferenceFit(device=device, form=form, phases=tuple(phases))


def rank_forms(
    groups: Sequence[GroupSample], bandwidths: HasBandwidth, *, device: Device, pairs: Sequence[PairSample] = ()
) -> tuple[InterferenceFit, ...]:
    """Fits every form and returns the fits, the one with the least error at left-out groups first.

    Forms for which there are too few groups are not among them; ``none`` always is. See ``fit_interference``.
    """
    fits = []
    for form in get_args(Form):
        if form == "leveled":  # ``mosaic`` is that, where it is any good
            continue
        try:
            fits.append(fit_interference(groups, bandwidths, form, device=device, pairs=pairs))
        except InvalidProfileError:
            if form == "none":
                raise
    return tuple(sorted(fits, key=_mean_error))


def _mean_error(fit: InterferenceFit) -> float:
    means = [of.held_out_mean for of in fit.phases]
    return statistics.fmean(math.inf if mean is None else mean for mean in means)


def _fit_phase(seen: Table, form: Form, phase: Phase) -> PhaseFit:
    fitted = fit_terms(seen, form)
    errors = left_out_errors(seen, form, fitted)
    coefficients, draws = _coefficients(fitted, seen)
    return PhaseFit(
        phase=phase,
        coefficients=coefficients,
        draws=draws,
        r_squared=explained(fitted, seen),
        held_out=HeldOutError(
            subject="interference",
            phase=phase,
            form=form,
            median=statistics.median(errors),
            largest=max(errors),
            count=len(errors),
        )
        if errors
        else None,
        held_out_mean=statistics.fmean(errors) if errors else None,
        num_samples=len(seen),
        num_groups=len(seen.groups),
        domain=Domain(
            least_share=float(seen.own.min()),
            most_share=float(seen.own.max()),
            most_total=float((seen.own + seen.pressure).max()),
            most_modules=int(seen.size.max()),
        ),
    )


def _coefficients(fitted: Fitted | Leveled, seen: Table) -> tuple[tuple[Coefficient, ...], tuple[Coefficient, ...]]:
    """Coefficients of the device, and draws of modules."""
    if isinstance(fitted, Leveled):
        return (
            tuple(_coefficient(name, value, fitted.known.get(name)) for name, value in fitted.named.items()),
            tuple(_coefficient(name, value, fitted.known_draws.get(name)) for name, value in fitted.draws.items()),
        )
    bounds = intervals(fitted, seen)
    named = zip(fitted.named.items(), bounds, strict=True)
    return tuple(_coefficient(name, value, bound) for (name, value), bound in named), ()


def _coefficient(name: str, value: float, bounds: tuple[float, float] | None) -> Coefficient:
    low, high = bounds or (-math.inf, math.inf)
    return Coefficient(name=name, value=value, low=_finite(low), high=_finite(high))


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
