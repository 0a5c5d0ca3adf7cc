"""Interference fitted on a device, used for every model on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.cost.fitting.fit import Coefficients, fit_leveling, fit_pairwise
from bench.cost.fitting.leveling_fit import why_not_leveled
from bench.cost.fitting.observation import ObservationTable, observe

from mosaic.cost.interference.bandwidth import Bandwidths
from mosaic.cost.interference.eq8 import Eq8, FullInterference
from mosaic.cost.interference.forms import InterferenceForm, find_form
from mosaic.cost.interference.leveling import LeveledBandwidth, Leveling
from mosaic.cost.interference.measured import MeasuredInterference
from mosaic.cost.interference.pairwise import SharedBandwidth, Sharing
from mosaic.cost.interference.protocol import HasBandwidth, Interference, NoInterference
from mosaic.device import Device
from mosaic.errors import InvalidProfileError
from mosaic.profile import GroupSample, PairSample, Phase, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFit:
    """The fit of one phase, and what its groups were like: beyond that it is a guess."""

    phase: Phase
    """Forward or backward."""
    coefficients: Coefficients
    """Of the form."""
    min_share: float
    """Least bandwidth that a member used alone, as a share of the device's."""
    max_share: float
    """Most of it."""
    max_modules: int
    """Modules of the largest group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceFit:
    """Interference of a device in one form."""

    device: Device
    """Where the groups ran."""
    form: str
    """Which form of the table."""
    phases: tuple[PhaseFit, ...]
    """One or two."""

    def of(self, phase: Phase) -> PhaseFit:
        """Returns the fit of a phase, or that of the other where this one was not measured."""
        return next((fit for fit in self.phases if fit.phase is phase), self.phases[0])

    def interference(self, bandwidths: HasBandwidth) -> Interference:
        """Returns the form for a model whose modules use the given bandwidths."""
        found = {phase: self.of(phase).coefficients for phase in Phase}
        eq8 = {phase: one for phase, one in found.items() if isinstance(one, Eq8)}
        leveling = {phase: one for phase, one in found.items() if isinstance(one, Leveling)}
        sharing = {phase: one for phase, one in found.items() if isinstance(one, Sharing)}
        if eq8:
            return FullInterference(eq8, bandwidths)
        return LeveledBandwidth(leveling, bandwidths) if leveling else SharedBandwidth(sharing, bandwidths)

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
        levelings = [fit.coefficients for fit in self.phases if isinstance(fit.coefficients, Leveling)]
        unknown = sorted({module for module, _ in shares} - {name for one in levelings for name in one.draws})
        if levelings and unknown:
            findings.append(
                f"no fitted group had {', '.join(unknown)}: what a slot of them draws is taken to be typical of the "
                "device; measure groups with them"
            )
        unmeasured = sorted({phase for _, phase in shares} - {fit.phase for fit in self.phases})
        findings += [f"no group was measured in {phase}; the other phase stands in" for phase in unmeasured]
        for (module, phase), found in shares.items():
            fit = self.of(phase)
            if found and (min(found) < fit.min_share or max(found) > fit.max_share):
                findings.append(
                    f"{module!r} {phase} uses {min(found):.2f} to {max(found):.2f} of the bandwidth; fitted groups had "
                    f"{fit.min_share:.2f} to {fit.max_share:.2f}: measure a group with it"
                )
        most = max(fit.max_modules for fit in self.phases)
        if num_modules > most:
            findings.append(f"{num_modules} modules may share a device; fitted groups had at most {most}")
        return tuple(findings)


def fit_interference(
    groups: Iterable[GroupSample],
    bandwidths: HasBandwidth,
    form: str,
    *,
    device: Device,
    pairs: Iterable[PairSample] = (),
) -> InterferenceFit:
    """Fits one form of interference to modules that ran side by side, each phase by itself.

    Args:
        groups: What ran; of any models.
        bandwidths: What their modules use alone.
        form: One that needs groups.
        device: Where they ran.
        pairs: Pairs of which one was timed.

    Raises:
        InvalidProfileError: There are no groups, too few, or groups that are too much alike; says what to measure.
        ValueError: There is no such form, it is not fitted, or a bandwidth is not known at a quota.
    """
    seen = observe(groups, bandwidths, pairs=pairs)
    by_phase = {phase: [o for o in seen if o.phase is phase] for phase in Phase}
    tables = {phase: ObservationTable.of(found) for phase, found in by_phase.items() if found}
    if not tables:
        raise InvalidProfileError("no modules were measured side by side; measure groups before fitting interference")
    phases = tuple(
        PhaseFit(
            phase=phase,
            coefficients=coefficients,
            min_share=float(tables[phase].own.min()),
            max_share=float(tables[phase].own.max()),
            max_modules=int(tables[phase].size.max()),
        )
        for phase, coefficients in _fit_phases(find_form(form), tables).items()
    )
    return InterferenceFit(device=device, form=form, phases=phases)


def interference_of(
    profile: Profile, bandwidths: Bandwidths, form: str, fit: InterferenceFit | None = None
) -> tuple[Interference, tuple[str, ...]]:
    """Returns the interference of a profile's model, and what a reader should know about it.

    Args:
        profile: What was measured.
        bandwidths: What its modules use alone.
        form: Name in the table of forms.
        fit: Coefficients of that form, found on this device before; fitted to the profile's groups and pairs where
            None.

    Raises:
        InvalidProfileError: As ``fit_interference``.
        ValueError: There is no such form, or the fit is of another one.
    """
    if fit is not None and fit.form != form:
        raise ValueError(f"interference={form!r}, but the fit is of the form {fit.form!r}; ask for that one")
    needs = find_form(form).needs
    if needs == "nothing":
        return NoInterference(), ()
    if needs == "pairs":
        return MeasuredInterference.from_profile(profile), ()
    if fit is None:
        fit = fit_interference(profile.groups, bandwidths, form, device=profile.device, pairs=profile.pairs)
    shares: dict[tuple[str, Phase], list[float]] = {}
    for sample in profile.samples:
        if sample.infeasible is None:
            share = bandwidths.bandwidth(sample.module, sample.phase, sample.degree, sample.quota)
            shares.setdefault((sample.module, sample.phase), []).append(share)
    estimated = [
        f"bandwidth of {m!r} {phase} is estimated" for m, phase in shares if not bandwidths.is_measured(m, phase)
    ]
    num_modules = min(len(profile.graph.names), profile.device.num_slots)
    outside = fit.outside(shares, device=profile.device, num_modules=num_modules)
    return fit.interference(bandwidths), (*outside, *estimated)


def _fit_phases(form: InterferenceForm, tables: Mapping[Phase, ObservationTable]) -> dict[Phase, Coefficients]:
    """Fits each phase; where our form came out in two kinds, both get the one that bends if it can be had."""
    if form.fit is None:
        raise ValueError(f"interference={form.name!r} has no coefficients to fit; it needs {form.needs}")
    found = {phase: form.fit(table) for phase, table in tables.items()}
    if len({type(one) for one in found.values()}) == 1:
        return found
    if any(why_not_leveled(table) for table in tables.values()):
        return {p: one if isinstance(one, Sharing) else fit_pairwise(tables[p]) for p, one in found.items()}
    return {p: one if isinstance(one, Leveling) else fit_leveling(tables[p]) for p, one in found.items()}
