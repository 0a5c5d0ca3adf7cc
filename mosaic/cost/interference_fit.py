"""Coefficients of interference as a file: found once on a device, used for every model on it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, get_args

from annotated_types import Ge

from mosaic.cost.contention import AdditiveInterference, Eq8, FullInterference, HasBandwidth, SharedBandwidth, Sharing
from mosaic.cost.fit import Form, explained, fit_terms, intervals, left_out_errors
from mosaic.cost.interference import Interference, NoInterference
from mosaic.cost.observation import Table, observe
from mosaic.device import FORBID_EXTRA, Device
from mosaic.errors import InvalidProfileError
from mosaic.profile import GroupSample, HeldOutError, PairSample, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One fitted coefficient and how sure it is."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    name: str
    """As in ``Eq8`` (milliseconds) or ``Sharing`` (shares of the time alone)."""
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
    knee: float = 1.0
    """Of ``Sharing``."""
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

    @property
    def named(self) -> dict[str, float]:
        """Coefficients by name."""
        return {coefficient.name: coefficient.value for coefficient in self.coefficients}


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceFit:
    """Interference of a device in one form."""

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
    device: Device
    """Where the groups ran."""
    form: Form
    """Which form."""
    phases: tuple[PhaseFit, ...]
    """One or two."""

    def of(self, phase: Phase) -> PhaseFit:
        """Returns the fit of a phase, or that of the other where this one was not measured."""
        return next((fit for fit in self.phases if fit.phase is phase), self.phases[0])

    def interference(self, bandwidths: HasBandwidth) -> Interference:
        """Returns the form for a model whose modules use the given bandwidths."""
        if self.form == "none":
            return NoInterference()
        if self.form in ("pairwise", "mosaic"):
            sharing = {phase: Sharing(**self.of(phase).named, knee=self.of(phase).knee) for phase in Phase}
            return SharedBandwidth(sharing, bandwidths)
        eq8 = {phase: Eq8(**self.of(phase).named) for phase in Phase}
        kind = FullInterference if self.form == "full" else AdditiveInterference
        return kind(eq8, bandwidths)

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
        form: ``none``, ``additive`` or ``full`` (Eq. 8 without and with its product), ``pairwise`` or
            ``mosaic``; the last also chooses among a few terms by cross-validation.
        device: Where they ran.
        pairs: Pairs of which one was timed.

    Raises:
        InvalidProfileError: There are no groups, too few, or groups that are too much alike; says what to measure.
        ValueError: A bandwidth is not known at a quota.
    """
    seen = observe(groups, bandwidths, pairs=pairs)
    by_phase = {phase: [o for o in seen if o.phase is phase] for phase in Phase}
    phases = tuple(_fit_phase(Table.of(found), form, phase) for phase, found in by_phase.items() if found)
    if not phases:
        raise InvalidProfileError("no modules were measured side by side; measure groups before fitting interference")
    return InterferenceFit(device=device, form=form, phases=phases)


def rank_forms(
    groups: Sequence[GroupSample], bandwidths: HasBandwidth, *, device: Device, pairs: Sequence[PairSample] = ()
) -> tuple[InterferenceFit, ...]:
    """Fits every form and returns the fits, the one with the least error at left-out groups first.

    Forms for which there are too few groups are not among them; ``none`` always is. See ``fit_interference``.
    """
    fits = []
    for form in get_args(Form):
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
    errors = left_out_errors(seen, form)
    bounds = intervals(fitted, seen)
    return PhaseFit(
        phase=phase,
        coefficients=tuple(
            Coefficient(name=name, value=value, low=_finite(low), high=_finite(high))
            for (name, value), (low, high) in zip(fitted.named.items(), bounds, strict=True)
        ),
        knee=fitted.terms.knee,
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


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
