"""How many measurements a surface takes: error against samples, of the paper's grid and of adaptive sampling."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.cost.figures import SHARE_OF_GRID, TRIED, absent, mean_figure
from bench.cost.ground import Ground
from bench.record import Figure
from mosaic.cost import ShapedSurface
from mosaic.cost.surfaces import next_of_both, next_shaped_sample
from mosaic.profile import Phase, Sample
from mosaic.profiler.quotas import default_quotas
from mosaic.shape import ModuleShape

SAMPLING = (
    "error of the paper's grid",
    "samples of the paper's grid",
    "samples of adaptive sampling at the accuracy of the paper's grid",
    SHARE_OF_GRID,
    "samples of adaptive sampling at an error of 3.65 %",
)
PAPER_ERROR = 0.0365
"""The paper's own prediction error with its grid (section 5.3.2); it gives none of surfaces alone."""
TRIED_COUNTS = (2, 3, 4, 5, 6, 8, 10)
"""Numbers of samples that adaptive sampling is stopped at."""

Curves = Mapping[tuple[str, Phase], Mapping[int, Sample]]
"""Samples of one degree by module and phase, then quota."""


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
        yield from absent(SAMPLING, why)
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
    orders = [{module: adaptive_order(seen, module, shapes.get(module)) for module, _ in seen} for seen, _ in devices]
    paper = _over_all(devices, [dict.fromkeys(order, grid) for order in orders], {})
    tried = [
        _over_all(devices, [{m: of[:count] for m, of in order.items()} for order in orders], shapes)
        for count in TRIED_COUNTS
    ]
    yield mean_figure(head + SAMPLING[0], paper.errors, source=source)
    yield mean_figure(head + SAMPLING[1], paper.counts, source=source, labels={"of": "one module at one degree"})
    counts = _fewest(tried, paper.mean_error)
    why = f"no number of samples up to {TRIED_COUNTS[-1]} gave the accuracy of the paper's grid"
    labels = {} if counts else {TRIED: "every number of samples"}
    yield mean_figure(head + SAMPLING[2], counts, source=source, reason=why, labels=labels)
    shares = [mine / theirs for mine, theirs in zip(counts, paper.counts, strict=bool(counts))]
    yield mean_figure(head + SAMPLING[3], shares, source=source, reason=why, labels=labels)
    counts = _fewest(tried, PAPER_ERROR)
    yield mean_figure(head + SAMPLING[4], counts, source=source, reason="no number of samples gave that error")


def adaptive_order(
    seen: Curves, module: str, shape: ModuleShape | None, *, bound: float = 1e-9, most: int = TRIED_COUNTS[-1]
) -> list[int]:
    """Returns the quotas at which adaptive sampling measures a module, in order."""
    phases = [phase for name, phase in seen if name == module]
    every = sorted(set.intersection(*(set(seen[module, phase]) for phase in phases)))
    taken: list[Sample] = []
    order: list[int] = []
    while len(order) < most:
        if shape is not None:
            quota = next_shaped_sample(taken, every, shape, bound=bound)
        else:
            quota = next_of_both(taken, every, bound=bound)
        if quota is None:
            break
        order.append(quota)
        taken += [seen[module, phase][quota] for phase in phases]
    return order


def sample_at(
    seen: Curves, truth: Curves, chosen: Mapping[str, Sequence[int]], shapes: Mapping[str, ModuleShape]
) -> Sampled:
    """Samples each module at the chosen quotas, and judges its surfaces at those between them."""
    counts, errors = [], []
    for module, quotas in chosen.items():
        phases = [phase for name, phase in seen if name == module]
        used = [quota for quota in quotas if all(quota in seen[module, phase] for phase in phases)]
        counts.append(len(used))
        for phase in phases:
            mine = [seen[module, phase][quota] for quota in used]
            others = [seen[module, other][quota] for other in phases if other is not phase for quota in used]
            surface = ShapedSurface(mine, shape=shapes.get(module), others=others)
            held = [s for q, s in truth[module, phase].items() if min(used) < q < max(used) and q not in used]
            errors += [abs(surface.time_ms(s.degree, s.quota) / s.median_ms - 1) for s in held]
    return Sampled(counts=tuple(counts), errors=tuple(errors))


def _over_all(
    devices: Sequence[tuple[Curves, Curves]],
    chosen: Sequence[Mapping[str, Sequence[int]]],
    shapes: Mapping[str, ModuleShape],
) -> Sampled:
    found = [sample_at(*of, quotas, shapes) for of, quotas in zip(devices, chosen, strict=True)]
    return Sampled(
        counts=tuple(c for one in found for c in one.counts), errors=tuple(e for one in found for e in one.errors)
    )


def _fewest(tried: Iterable[Sampled], error: float) -> tuple[int, ...]:
    """Returns the numbers of samples of the cheapest that is as good; none where none is."""
    good = [one.counts for one in tried if one.mean_error <= error]
    return min(good, key=statistics.fmean, default=())
