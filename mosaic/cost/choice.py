"""Which interference a profile's model gets, and what to know about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from mosaic.cost.fit import Form
from mosaic.cost.interference.bandwidth import Bandwidths
from mosaic.cost.interference.measured import Interference, MeasuredInterference, NoInterference
from mosaic.cost.interference_fit import InterferenceFit, fit_interference
from mosaic.device import Device
from mosaic.profile import Phase, Profile

InterferenceKind = Literal["measured"] | Form
"""A table of pairs, or a form of ``fit_interference``."""


def choose_interference(
    profile: Profile, bandwidths: Bandwidths, kind: InterferenceKind, fit: InterferenceFit | None
) -> tuple[Interference, tuple[str, ...]]:
    """Returns the interference of a profile's model, and what a reader should know about it; see ``from_profile``."""
    if fit is not None and fit.form != kind:
        raise ValueError(f"interference={kind!r}, but the fit is of the form {fit.form!r}; ask for that one")
    if kind == "measured":
        return MeasuredInterference.from_profile(profile), ()
    if kind == "none":
        return NoInterference(), ()
    if fit is None:
        fit = fit_interference(profile.groups, bandwidths, kind, device=profile.device, pairs=profile.pairs)
    shares: dict[tuple[str, Phase], list[float]] = {}
    for sample in profile.samples:
        if sample.infeasible is None:
            share = bandwidths.bandwidth(sample.module, sample.phase, sample.degree, sample.quota)
            shares.setdefault((sample.module, sample.phase), []).append(share)
    estimated = [
        f"bandwidth of {m!r} {phase} is estimated" for m, phase in shares if not bandwidths.is_measured(m, phase)
    ]
    outside = check_fit(fit, shares, device=profile.device, num_modules=len(profile.graph.names))
    return fit.interference(bandwidths), (*outside, *estimated)


def check_fit(
    fit: InterferenceFit, shares: Mapping[tuple[str, Phase], Sequence[float]], *, device: Device, num_modules: int
) -> tuple[str, ...]:
    """Says where a model of so many modules lies outside what was fitted; see ``InterferenceFit.outside``."""
    return fit.outside(shares, device=device, num_modules=min(num_modules, device.num_slots))
