"""How many measurements a surface takes: error against samples, of the paper's grid and of adaptive sampling."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.cost.figures import TRIED, absent, mean_figure
from bench.cost.ground import Ground
from bench.record import Figure
from mosaic.cost import ScalingSurface, ShapedSurface
from mosaic.cost.surfaces.sampling import next_of_both, next_shaped_sample
from mosaic.profile import Phase, Sample
from mosaic.profiler.quotas import default_quotas
from mosaic.shape import ModuleShape

SAMPLING = (
    "error of the paper's grid",
    "samples of the paper's grid",
    "samples of adaptive sampling at the accuracy of the paper's grid",
    "samples of adaptive sampling over those of the paper's grid",
    "samples of adaptive sampling at an error of 3.65 %",
)
PAPER_ERROR = 0.0365
"""The paper's own prediction error with its grid (section 5.3.2); it gives none of surfaces alone."""
BOUNDS = (0.1, 0.05, 0.02)
"""Bounds at which adaptive sampling stops by itself."""
MOST = (2, 3, 4, 5, 6, 8, 10)
"""Numbers of samples of the curve of error against samples."""

Curves = Mapping[tuple[str, Phase], Mapping[int, Sample]]
"""Samples of one degree by module and phase, then quota."""
Choose = Callable[[tuple[int, str], Sequence[Sample], Sequence[int]], int | None]
"""Given the number of a device and a module, its samples so far and all quotas, where to measure next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One way of sampling over all modules."""

    counts: tuple[int, ...]
    """Quotas at which each module was measured; both phases at once."""
    errors: tuple[float, ...]
    """Relative errors at every quota that was not sampled, of all modules and phases."""

    @property
    def mean_error(self) -> float:
        """Mean of the errors; 0 where every quota was sampled."""
        return statistics.fmean(self.errors) if self.errors else 0.0


def bound_name(bound: float) -> str:
    """Names the error of adaptive sampling that stops at a bound."""
    return f"error of adaptive sampling with a bound of {bound:g}"


def count_name(count: int, *, shaped: bool = True) -> str:
    """Names the error of adaptive sampling that stops after some samples, with counted shapes or without."""
    way = "adaptive sampling" if shaped else "sampling without counted shapes"
    return f"error of {way} with {count} samples"


def sampling_names() -> list[str]:
    """Returns the names of figures of sampling."""
    counts = [count_name(count, shaped=shaped) for count in MOST for shaped in (True, False)]
    return [*SAMPLING, *(bound_name(bound) for bound in BOUNDS), *counts]


def curves_of(samples: Iterable[Sample]) -> dict[tuple[str, Phase], dict[int, Sample]]:
    """Returns samples that ran by module, phase and quota."""
    found: dict[tuple[str, Phase], dict[int, Sample]] = {}
    for sample in samples:
        if sample.times_ms and sample.median_ms > 0:
            found.setdefault((sample.module, sample.phase), {})[sample.quota] = sample
    return found


def measure_sampling(ground: Ground) -> Iterator[Figure]:
    """Replays ways of sampling over a whole grid of measurements."""
    if len(ground.held_quotas) < 3:
        why = f"this machine has {ground.num_slots} {ground.unit}: there is no grid to choose from"
        yield from absent(sampling_names(), why)
        return
    every = (*ground.later.samples, *ground.profile.samples)  # where both have a point, the profile's counts
    curves = {
        subject: of
        for subject, of in curves_of(s for s in every if s.degree == 1).items()
        if len(of) > len(ground.fit_quotas)
    }
    shapes = {shape.module: shape for shape in ground.profile.shapes}
    yield from sampling_figures([(curves, curves)], shapes, default_quotas(ground.bench.device), source="measured")


def sampling_figures(
    devices: Sequence[tuple[Curves, Curves]],
    shapes: Mapping[str, ModuleShape],
    grid: Sequence[int],
    *,
    source: str,
    head: str = "",
) -> Iterator[Figure]:
    """Yields errors and numbers of samples of the paper's grid and of adaptive sampling.

    Args:
        devices: For each device, curves as they would be measured at every quota, and without noise (or the same).
        shapes: What counted operators say of the modules.
        grid: Quotas of the paper's grid.
        source: Of the figures.
        head: Put before their names.
    """
    none: Mapping[str, ModuleShape] = {}

    def over_all(choose: Choose, shapes: Mapping[str, ModuleShape]) -> Sampled:
        found = [sample_all(seen, truth, choose, shapes, device=i) for i, (seen, truth) in enumerate(devices)]
        return Sampled(
            counts=tuple(c for one in found for c in one.counts), errors=tuple(e for one in found for e in one.errors)
        )

    paper = over_all(
        lambda _, taken, every: next((q for q in grid if q in every and q not in _quotas(taken)), None), none
    )
    yield mean_figure(head + SAMPLING[0], paper.errors, source=source)
    yield mean_figure(head + SAMPLING[1], paper.counts, source=source, labels={"of": "one module at one degree"})
    paths: dict[tuple[int, str], list[int]] = {}
    shaped = {count: over_all(first_of(count, shapes, paths), shapes) for count in MOST}
    paths = {}
    plain = {count: over_all(first_of(count, none, paths), none) for count in MOST}
    yield from _as_good(list(shaped.values()), paper, source=source, head=head)
    for bound in BOUNDS:
        found = over_all(_until(bound, shapes), shapes)
        labels = {"mean number of samples": f"{statistics.fmean(found.counts):.2f}"}
        yield mean_figure(head + bound_name(bound), found.errors, source=source, labels=labels)
    for count, found in shaped.items():
        yield mean_figure(head + count_name(count), found.errors, source=source)
        yield mean_figure(head + count_name(count, shaped=False), plain[count].errors, source=source)


def _as_good(found: Sequence[Sampled], paper: Sampled, *, source: str, head: str) -> Iterator[Figure]:
    counts = _fewest(found, paper.mean_error)
    why = f"no number of samples up to {MOST[-1]} gave the accuracy of the paper's grid"
    tried = {} if counts else {TRIED: "every number of samples"}
    yield mean_figure(head + SAMPLING[2], counts, source=source, reason=why, labels=tried)
    shares = [mine / theirs for mine, theirs in zip(counts, paper.counts, strict=bool(counts))]
    yield mean_figure(head + SAMPLING[3], shares, source=source, reason=why, labels=tried)
    counts = _fewest(found, PAPER_ERROR)
    yield mean_figure(head + SAMPLING[4], counts, source=source, reason="no number of samples gave that error")


def _fewest(found: Iterable[Sampled], error: float) -> tuple[int, ...]:
    """Returns the numbers of samples of the cheapest that is as good; none where none is."""
    good = [one.counts for one in found if one.mean_error <= error]
    return min(good, key=statistics.fmean, default=())


def first_of(count: int, shapes: Mapping[str, ModuleShape], paths: dict[tuple[int, str], list[int]]) -> Choose:
    """Returns adaptive sampling that goes on to a number of samples, however little is left open.

    Fewer samples are the first of more, so the way is found once a module.

    Args:
        count: Samples to take.
        shapes: What counted operators say of the modules.
        paths: Ways that were found, by curves and module; added to.
    """
    further = _until(1e-9, shapes)

    def choose(key: tuple[int, str], taken: Sequence[Sample], every: Sequence[int]) -> int | None:
        path, done = paths.setdefault(key, []), len(_quotas(taken))
        if done >= count:
            return None
        if done == len(path) and (quota := further(key, taken, every)) is not None:
            path.append(quota)
        return path[done] if done < len(path) else None

    return choose


def _until(bound: float, shapes: Mapping[str, ModuleShape]) -> Choose:
    def choose(key: tuple[int, str], taken: Sequence[Sample], every: Sequence[int]) -> int | None:
        module = key[1]
        if module in shapes:
            return next_shaped_sample(taken, every, shapes[module], bound=bound)
        return next_of_both(taken, every, bound=bound)

    return choose


def sample_all(
    seen: Curves, truth: Curves, choose: Choose, shapes: Mapping[str, ModuleShape], *, device: int = 0
) -> Sampled:
    """Samples each module until ``choose`` returns None, and judges it at what was not sampled."""
    counts, errors = [], []
    for module in dict.fromkeys(module for module, _ in seen):
        phases = [phase for name, phase in seen if name == module]
        every = sorted(set.intersection(*(set(seen[module, phase]) for phase in phases)))
        taken: list[Sample] = []
        while (quota := choose((device, module), taken, every)) is not None:
            taken += [seen[module, phase][quota] for phase in phases]
        counts.append(len(_quotas(taken)))
        for phase in phases:
            mine = [sample for sample in taken if sample.phase is phase]
            others = [sample for sample in taken if sample.phase is not phase]
            shape = shapes.get(module)
            surface = ShapedSurface(mine, shape=shape, others=others) if shape is not None else ScalingSurface(mine)
            inside = range(min(_quotas(taken)) + 1, max(_quotas(taken)))
            held = [s for quota, s in truth[module, phase].items() if quota in inside and quota not in _quotas(taken)]
            errors += [abs(surface.time_ms(s.degree, s.quota) / s.median_ms - 1) for s in held]
    return Sampled(counts=tuple(counts), errors=tuple(errors))


def _quotas(samples: Sequence[Sample]) -> set[int]:
    return {sample.quota for sample in samples}
