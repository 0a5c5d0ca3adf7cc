"""How far scaling surfaces are off where nothing was measured, and how many measurements adaptive sampling takes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from bench.cost_figures import SLOTS, TRIED, absent, mean_figure
from bench.cost_ground import FIT_DEGREES, HELD_DEGREE, Ground
from bench.cost_models import NAMES, input_shape, make_module
from bench.record import Figure
from mosaic.cost import ScalingSurface, next_sample
from mosaic.cost.analytic import count_degrees
from mosaic.cost.counts import ModuleCounts
from mosaic.cost.roofline import phase_ms
from mosaic.errors import InvalidProfileError
from mosaic.hardware import find_hardware
from mosaic.profile import Phase, Sample
from mosaic.profiler.quotas import default_quotas

AT_QUOTAS = "surface error at held-out quotas"
AT_DEGREES = "surface error at a held-out degree"
REPEATED = "difference of the same points measured twice"
SAMPLING = (
    "error of the paper's grid",
    "samples of the paper's grid",
    "samples of adaptive sampling at the accuracy of the paper's grid",
    "samples of adaptive sampling over those of the paper's grid",
    "samples of adaptive sampling at an error of 3.65 %",
)
BOUNDS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
PAPER_ERROR = 0.0365
"""The paper's own prediction error with its grid (section 5.3.2); it gives none of surfaces alone."""
COUNTED = tuple(name for name in NAMES if name != "audio")
"""Modules whose counts are quick to get: recurrent cells are counted step by step."""
_NOISE = 0.01


Choose = Callable[[Sequence[Sample], Sequence[int]], int | None]
"""Given samples so far and all quotas, where to measure next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One way of sampling over all curves."""

    counts: tuple[int, ...]
    """Samples of each curve."""
    errors: tuple[float, ...]
    """Relative errors at every quota that it did not sample, of all curves."""

    @property
    def mean_error(self) -> float:
        """Mean of the errors; 0 where every quota was sampled."""
        return statistics.fmean(self.errors) if self.errors else 0.0


def surface_errors(fit: Sequence[Sample], held: Sequence[Sample]) -> list[float]:
    """Returns relative errors of surfaces at held-out samples, of all modules and phases.

    Raises:
        ValueError: A point is fitted and held out, or lies outside of what was fitted.
    """
    points = {(s.module, s.phase, s.degree, s.quota) for s in fit}
    both = points & {(s.module, s.phase, s.degree, s.quota) for s in held}
    if both:
        raise ValueError(f"{len(both)} points are fitted and held out, such as {min(both)}")
    errors = []
    for module, phase in sorted({(s.module, s.phase) for s in held}):
        mine = [s for s in fit if (s.module, s.phase) == (module, phase)]
        theirs = [s for s in held if (s.module, s.phase) == (module, phase) and s.times_ms and s.median_ms > 0]
        try:
            surface = ScalingSurface(mine)
        except InvalidProfileError:  # a phase that never ran
            continue
        errors += [abs(surface.time_ms(s.degree, s.quota) / s.median_ms - 1) for s in theirs]
    return errors


def measure_surface(ground: Ground) -> Iterator[Figure]:
    """Judges surfaces by samples taken after all that were fitted."""
    fit, later = ground.profile.samples, ground.later.samples
    held = [s for s in later if s.degree == 1 and s.quota in ground.held_quotas]
    why = f"this machine has {ground.num_slots} {ground.unit}: every quota is at an end of the surface"
    yield mean_figure(AT_QUOTAS, surface_errors(fit, held), source="measured", reason=why)
    held = [s for s in later if s.degree == HELD_DEGREE]
    labels = {"degree": str(HELD_DEGREE), "of": "one replica's share of the batch, without communication"}
    yield mean_figure(AT_DEGREES, surface_errors(fit, held), source="measured", labels=labels)
    first = {(s.module, s.phase, s.quota): s for s in fit if s.degree == 1 and s.times_ms}
    pairs = [(first.get((s.module, s.phase, s.quota)), s) for s in later if s.degree == 1 and s.times_ms]
    again = [abs(a.median_ms / b.median_ms - 1) for a, b in pairs if a is not None and b.median_ms > 0]
    yield mean_figure(REPEATED, again, source="measured", labels={"is": "the least error that any model can show here"})


def measure_sampling(ground: Ground) -> Iterator[Figure]:
    """Replays both ways of sampling over a whole grid of measurements."""
    if len(ground.held_quotas) < 3:
        why = f"this machine has {ground.num_slots} {ground.unit}: there is no grid to choose from"
        yield from absent((*SAMPLING, *(bound_name(bound) for bound in BOUNDS)), why)
        return
    found = {(s.module, s.phase, s.quota): s for s in (*ground.later.samples, *ground.profile.samples) if s.degree == 1}
    curves = [
        [s for s in found.values() if (s.module, s.phase) == subject and s.times_ms and s.median_ms > 0]
        for subject in sorted({(s.module, s.phase) for s in found.values()})
    ]
    curves = [curve for curve in curves if len(curve) > len(ground.fit_quotas)]
    yield from sampling_figures(curves, curves, default_quotas(ground.bench.device), source="measured", head="")


def bound_name(bound: float) -> str:
    """Names the error of adaptive sampling that stops at a bound."""
    return f"error of adaptive sampling with a bound of {bound:g}"


def sampling_figures(
    seen: Sequence[Sequence[Sample]],
    truth: Sequence[Sequence[Sample]],
    grid: Sequence[int],
    *,
    source: str,
    head: str,
) -> Iterator[Figure]:
    """Yields errors and numbers of samples of the paper's grid and of adaptive sampling.

    Args:
        seen: Curves as they would be measured, at every quota.
        truth: The same without noise, or the same.
        grid: Quotas of the paper's grid.
        source: Of the figures.
        head: Put before their names.
    """
    paper = sample_all(seen, truth, lambda samples, _: next((q for q in grid if q not in _quotas(samples)), None))
    adaptive = {
        bound: sample_all(seen, truth, lambda samples, all_, bound=bound: next_sample(samples, all_, bound=bound))
        for bound in BOUNDS
    }
    yield mean_figure(head + SAMPLING[0], paper.errors, source=source)
    yield mean_figure(head + SAMPLING[1], paper.counts, source=source, labels={"of": "one curve at one degree"})
    counts = _fewest(adaptive.values(), paper.mean_error)
    why = "no bound gave the accuracy of the paper's grid"
    tried = {} if counts else {TRIED: "every bound"}
    yield mean_figure(head + SAMPLING[2], counts, source=source, reason=why, labels=tried)
    shares = [mine / theirs for mine, theirs in zip(counts, paper.counts, strict=bool(counts))]
    yield mean_figure(head + SAMPLING[3], shares, source=source, reason=why, labels=tried)
    counts = _fewest(adaptive.values(), PAPER_ERROR)
    yield mean_figure(head + SAMPLING[4], counts, source=source, reason="no bound gave that error")
    for bound, found in adaptive.items():
        labels = {"mean number of samples": f"{statistics.fmean(found.counts):.2f}"}
        yield mean_figure(head + bound_name(bound), found.errors, source=source, labels=labels)


def _fewest(found: Iterable[Sampled], error: float) -> tuple[int, ...]:
    """Returns the numbers of samples of the cheapest that is as good; none where none is."""
    good = [one.counts for one in found if one.mean_error <= error]
    return min(good, key=statistics.fmean, default=())


def sample_all(seen: Sequence[Sequence[Sample]], truth: Sequence[Sequence[Sample]], choose: Choose) -> Sampled:
    """Samples each curve until ``choose`` returns None, and judges it at what was not sampled."""
    counts, errors = [], []
    for curve, true in zip(seen, truth, strict=True):
        by_quota = {sample.quota: sample for sample in curve}
        taken: list[Sample] = []
        while (quota := choose(taken, sorted(by_quota))) is not None:
            taken.append(by_quota[quota])
        inside = range(min(_quotas(taken)), max(_quotas(taken)) + 1)
        held = [s for s in true if s.quota not in _quotas(taken) and s.quota in inside]
        counts.append(len(taken))
        errors += surface_errors(taken, held)
    return Sampled(counts=tuple(counts), errors=tuple(errors))


def simulate_surface() -> Iterator[Figure]:
    """Judges surfaces and sampling by what the analytic model says of an H100, cut into 16 slots and into 66."""
    for num_slots in SLOTS:
        dice = random.Random(num_slots)
        head = f"simulated ({num_slots} slots): "
        every = [s for degree in (*FIT_DEGREES, HELD_DEGREE) for s in simulated_samples(num_slots, degree)]
        grid = tenths(num_slots)
        seen = [_noisy(sample, dice) for sample in every]
        fit = [s for s in seen if s.quota in grid and s.degree in FIT_DEGREES]
        inside = [s for s in every if grid[0] <= s.quota <= grid[-1]]
        held = [s for s in inside if s.quota not in grid and s.degree == 1]
        yield mean_figure(head + AT_QUOTAS, surface_errors(fit, held), source="simulated")
        held = [s for s in inside if s.degree == HELD_DEGREE]
        yield mean_figure(head + AT_DEGREES, surface_errors(fit, held), source="simulated")
        subjects = sorted({(s.module, s.phase) for s in every})
        first = [[s for s in seen if (s.module, s.phase) == of and s.degree == 1] for of in subjects]
        truth = [[s for s in every if (s.module, s.phase) == of and s.degree == 1] for of in subjects]
        yield from sampling_figures(first, truth, grid, source="simulated", head=head)


@cache
def counted_modules() -> dict[str, dict[int, ModuleCounts]]:
    """Counts all modules at GPU sizes without any data."""
    found = {}
    for name in COUNTED:
        with torch.device("meta"):
            module = make_module(name, "gpu").to(torch.bfloat16)
            given = torch.empty(input_shape(name, "gpu"), dtype=torch.bfloat16)
        found[name] = count_degrees(module, (given,), degrees=(*FIT_DEGREES, HELD_DEGREE))
    return found


def simulated_samples(num_slots: int, degree: int) -> list[Sample]:
    """Returns what the analytic model says of an H100, waves of tiles and launches included, at every quota."""
    hardware = replace(find_hardware("h100-80g"), sms_per_slot=132 // num_slots)
    return [
        Sample(
            module=name,
            phase=phase,
            quota=quota,
            degree=degree,
            times_ms=(phase_ms(by_degree[degree].phase(phase), hardware, quota * hardware.sms_per_slot),),
        )
        for name, by_degree in counted_modules().items()
        for phase in Phase
        for quota in range(1, num_slots + 1)
    ]


def _noisy(sample: Sample, dice: random.Random) -> Sample:
    return replace(sample, times_ms=tuple(time * dice.lognormvariate(0, _NOISE) for time in sample.times_ms))


def tenths(num_slots: int) -> tuple[int, ...]:
    """Returns the slots nearest to tenths of a device."""
    return tuple(sorted({max(1, round(tenth / 10 * num_slots)) for tenth in range(1, 11)}))


def _quotas(samples: Sequence[Sample]) -> set[int]:
    return {sample.quota for sample in samples}
