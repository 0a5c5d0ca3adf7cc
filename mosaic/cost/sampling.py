"""Where to measure a module next, and how well its measurements predict each other. Pure functions; nothing runs here.

The paper samples every tenth of a device (section 3.3). Most modules need fewer: between two samples time can neither
rise nor fall faster than the slots grow, so it lies between two roofs,

    time
     t0 *------.          upper: min(t0, t1 * q1 / q)
        |`.      `.
        |  `.      `.     lower: max(t1, t0 * q0 / q), with its corner where a module that scales
        |    `-------* t1        perfectly meets the floor that it ends on
        q0   corner  q1

and where they meet (straight scaling, a flat floor) there is nothing to learn. The next sample goes to the corner
of the widest gap: a roofline is known after it, anything smoother is bent most there. Waves of thread blocks step
over these roofs by about a wave; the cross-validated error sees that, as far as samples fall on the steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from mosaic.cost.surfaces.curve import roofs_ms
from mosaic.cost.surfaces.posterior import ShapePosterior
from mosaic.cost.surfaces.surface import ScalingSurface, Surface, subject_of
from mosaic.profile import HeldOutError, Phase, Sample
from mosaic.shape import ModuleShape

MakeSurface = Callable[[Sequence[Sample]], Surface]
"""Builds a form of surface from samples of one module and phase."""


def held_out_errors(
    samples: Sequence[Sample], *, form: str = "smooth", make: MakeSurface = ScalingSurface
) -> HeldOutError | None:
    """Leaves out one sample after the other and predicts it from the rest of its degree.

    The first and the last quota of a degree are never left out: without them they lie outside.

    Args:
        samples: Of one module and phase, at any degrees and quotas.
        form: Name of the form, for the record.
        make: Builds it.

    Returns:
        Relative errors against the medians that were left out; None where no degree has three feasible samples.

    Raises:
        InvalidProfileError: The samples are not of one module and phase.
    """
    module, phase = subject_of(samples)
    errors = [error for of in _by_degree(samples) for error in omission_errors(of, make)]
    if not errors:
        return None
    return HeldOutError(
        subject=module,
        phase=phase,
        form=form,
        median=statistics.median(errors),
        largest=max(errors),
        count=len(errors),
    )


def next_sample(samples: Sequence[Sample], candidates: Sequence[int], *, bound: float) -> int | None:
    """Returns the quota at which a measurement would tell most, or None where enough is known.

    First the ends of ``candidates``, since nothing is extrapolated. Then the widest gap, until every gap leaves
    less than ``bound`` open to either side, or samples that are left out are predicted within ``bound`` of
    what was measured (five samples or more, so that a sample left out does not leave a hole). An infeasible end moves
    inwards: halfway to the nearest feasible sample, or to the other end.

    Args:
        samples: Of one module, phase and degree, so far; may be empty.
        candidates: Quotas in slots that could be measured.
        bound: Relative error that is good enough; 0.03 is three percent.

    Raises:
        ValueError: There are no candidates, or ``bound`` is not positive.
    """
    if not candidates or not bound > 0:
        raise ValueError(
            f"{len(candidates)} candidates, bound={bound}; give at least one candidate and a positive bound"
        )
    tried = {sample.quota for sample in samples}
    feasible = sorted((s for s in samples if s.infeasible is None), key=lambda sample: sample.quota)
    end = _missing_end(sorted(set(candidates)), tried, [sample.quota for sample in feasible])
    if end is not None or len(feasible) < 2:
        return end
    if len(feasible) >= 5 and max(omission_errors(feasible, ScalingSurface), default=0.0) < bound:
        return None
    gaps = (_corner(left, right, set(candidates) - tried) for left, right in itertools.pairwise(feasible))
    width, quota = max((gap for gap in gaps if gap is not None), default=(0.0, 0))
    return -quota if width > 2 * math.log1p(bound) else None


def next_shaped_sample(
    samples: Sequence[Sample],
    candidates: Sequence[int],
    shape: ModuleShape,
    *,
    bound: float,
    known: Sequence[Sample] = (),
) -> int | None:
    """As ``next_sample`` for a module whose shape was counted: where the posterior knows least of both phases.

    The ends come first here, too. A third sample, between them, is always taken: it is the one that tells whether the
    shape fits. Then it goes on while the relative standard deviation at any quota is ``bound`` or more.

    Args:
        samples: Both phases of one module at one degree, so far; may be empty.
        candidates: Quotas in slots that could be measured.
        shape: Of this module.
        bound: Relative standard deviation that is good enough.
        known: Samples of the module at other degrees, which tell of this one.

    Raises:
        ValueError: There are no candidates, or ``bound`` is not positive.
    """
    first = [sample for sample in samples if sample.phase is Phase.FORWARD]
    end = next_sample(first, candidates, bound=math.inf)  # nothing but the ends
    feasible = sorted({sample.quota for sample in first if sample.infeasible is None})
    if end is not None or not feasible:
        return end
    if not bound > 0:
        raise ValueError(f"bound={bound}; give a positive bound")
    tried = {sample.quota for sample in samples}
    inside = [quota for quota in candidates if feasible[0] < quota < feasible[-1] and quota not in tried]
    degree = first[0].degree
    posterior = ShapePosterior(shape, (*samples, *known))
    if posterior.is_refuted:
        return next_of_both(samples, candidates, bound=bound)
    return posterior.next_quota(degree, inside, bound=0.0 if len(feasible) < 3 else bound)


def next_of_both(samples: Sequence[Sample], candidates: Sequence[int], *, bound: float) -> int | None:
    """As ``next_sample``, given both phases of a module: forward first, then backward if there is one."""
    for phase in Phase:
        of_phase = [sample for sample in samples if sample.phase is phase]
        if phase is Phase.FORWARD or any(sample.times_ms and sample.median_ms > 0 for sample in of_phase):
            quota = next_sample(of_phase, candidates, bound=bound)
            if quota is not None:
                return quota
    return None


def _missing_end(candidates: Sequence[int], tried: set[int], feasible: Sequence[int]) -> int | None:
    """Returns the next quota to try at the ends: the whole device first, since what runs anywhere runs there."""
    for end in (candidates[-1], candidates[0]):
        if end not in tried:
            return end
    if not feasible:
        middle = candidates[len(candidates) // 2]
        return None if middle in tried else middle
    above = min((quota for quota in tried if quota > feasible[-1]), default=feasible[-1])
    below = max((quota for quota in tried if quota < feasible[0]), default=feasible[0])
    for low, high in ((feasible[-1], above), (below, feasible[0])):
        between = [quota for quota in candidates if low < quota < high]
        if between:
            return between[len(between) // 2]
    return None


def _corner(left: Sample, right: Sample, untried: set[int]) -> tuple[float, int] | None:
    """How far the roofs are apart in a gap (as a logarithm), and minus the quota nearest to the lower one's corner."""
    inside = [quota for quota in untried if left.quota < quota < right.quota]
    first, last = left.median_ms, right.median_ms
    if not inside or not 0 < last < first:
        return None
    corner = left.quota * first / last
    quota = min(inside, key=lambda q: (abs(math.log(q / corner)), q))
    lower, upper = roofs_ms(quota, (left.quota, first), (right.quota, last))
    return math.log(upper / lower), -quota  # the smaller quota of two equal gaps


def omission_errors(samples: Sequence[Sample], make: MakeSurface) -> list[float]:
    """Returns the relative error at each sample but the first and the last, of a surface made of the others.

    Args:
        samples: Of one module, phase and degree, feasible, by rising quota.
        make: Builds the surface.
    """
    errors = []
    for index in range(1, len(samples) - 1):
        held = samples[index]
        if held.median_ms > 0:
            rest = [*samples[:index], *samples[index + 1 :]]
            errors.append(abs(make(rest).time_ms(held.degree, held.quota) / held.median_ms - 1))
    return errors


def _by_degree(samples: Sequence[Sample]) -> list[list[Sample]]:
    feasible = sorted((s for s in samples if s.infeasible is None), key=lambda sample: (sample.degree, sample.quota))
    return [list(of) for _, of in itertools.groupby(feasible, key=lambda sample: sample.degree)]
