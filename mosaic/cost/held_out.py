"""How well a profile predicts itself: errors at held-out measurements, of every form that it can be fitted with."""

from __future__ import annotations

from collections.abc import Sequence

from mosaic.cost.alpha_beta import AlphaBetaSurface
from mosaic.cost.interference.bandwidth import BandwidthEstimate, Bandwidths
from mosaic.cost.interference_fit import rank_forms
from mosaic.cost.surfaces.sampling import held_out_errors
from mosaic.cost.surfaces.shaped import shaped_without
from mosaic.errors import InvalidProfileError
from mosaic.profile import HeldOutError, Phase, Profile, Sample


def errors_of_profile(profile: Profile, *, estimate: BandwidthEstimate | None = None) -> tuple[HeldOutError, ...]:
    """Returns errors of all surfaces for each module and phase, then of each form of interference, best first.

    For ``Profile.held_out``. What cannot be judged (two samples, a module that never ran, groups without
    bandwidths) is left out.

    Args:
        profile: Samples and groups.
        estimate: Asked for bandwidths that were not measured.
    """
    found: list[HeldOutError | None] = []
    for name in profile.graph.names:
        for phase in Phase:
            samples = [s for s in profile.samples if (s.module, s.phase) == (name, phase)]
            if any(sample.infeasible is None for sample in samples):
                found.append(held_out_errors(samples))
                found.append(_shaped(profile, name, samples))
                found.append(held_out_errors(samples, form="alpha-beta", make=AlphaBetaSurface))
    try:
        bandwidths = Bandwidths(profile.samples, estimate=estimate)
        ranked = rank_forms(profile.groups, bandwidths, device=profile.device, pairs=profile.pairs)
    except (InvalidProfileError, ValueError):  # no groups, or of modules whose bandwidth is not known
        ranked = ()
    found += [of.held_out for fit in ranked for of in fit.phases]
    return tuple(error for error in found if error is not None)


def _shaped(profile: Profile, name: str, samples: Sequence[Sample]) -> HeldOutError | None:
    shape = profile.shape_of(name)
    if shape is None:
        return None
    others = [s for s in profile.samples if s.module == name and s.phase is not samples[0].phase]
    return held_out_errors(samples, form="shaped", make=shaped_without(shape, others))
