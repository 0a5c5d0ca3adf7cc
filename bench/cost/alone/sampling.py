"""How many measurements a surface takes: the paper's grid, and adaptive sampling stopped where other modules say."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from bench.cost.figures import absent, mean_figure
from bench.record import Figure, Source
from mosaic.cost import ShapedSurface
from mosaic.cost.surfaces import next_of_both, next_shaped_sample
from mosaic.profile import Phase, Sample
from mosaic.shape import ModuleShape

_NAMES = (
    "error of the paper's grid",
    "samples of the paper's grid",
    "samples of adaptive sampling, chosen on other modules for the grid's accuracy",
    "error of adaptive sampling with as many samples, shaped by counted operators",
    "error of adaptive sampling with as many samples, interpolated (no prior)",
)
TRIED_COUNTS = (2, 3, 4, 5, 6, 8, 10)
"""Numbers of samples that adaptive sampling is stopped at."""

Curves = Mapping[tuple[str, Phase], Mapping[int, Sample]]
"""Samples of degree 1 by module and phase, then quota."""


def sampling_names(head: str) -> tuple[str, ...]:
    """Returns the names of the figures."""
    return tuple(head + name for name in _NAMES)


def curves_of(samples: Iterable[Sample]) -> dict[tuple[str, Phase], dict[int, Sample]]:
    """Returns samples of degree 1 that ran by module, phase and quota; of two, the first."""
    found: dict[tuple[str, Phase], dict[int, Sample]] = {}
    for sample in samples:
        if sample.degree == 1 and sample.times_ms and sample.median_ms > 0:
            found.setdefault((sample.module, sample.phase), {}).setdefault(sample.quota, sample)
    return found


def sampling_figures(
    samples: Iterable[Sample],
    shapes: Mapping[str, ModuleShape],
    *,
    grid: Sequence[int],
    choose: Sequence[str],
    judge: Sequence[str],
    source: Source,
    head: str,
) -> Iterator[Figure]:
    """Replays both ways of sampling over everything that was measured of a module.

    Args:
        samples: Of degree 1 at every quota; others are left out.
        shapes: What counted operators say of the modules.
        grid: Quotas of the paper's grid.
        choose: Modules by which adaptive sampling is stopped.
        judge: Modules that judge.
        source: Of the figures.
        head: Put before their names.
    """
    curves = curves_of(samples)
    names = sampling_names(head)
    if not any(len(of) > len(grid) for of in curves.values()):
        yield from absent(names, "the grid has every quota of this device: there is nothing to choose", source=source)
        return
    paper = {module: _errors(curves, module, grid, None) for module in (*choose, *judge)}
    yield mean_figure(names[0], _all(paper[module] for module in judge), source=source)
    counts = [float(len([q for q in grid if all(q in of for of in curves.values())]))]
    yield mean_figure(names[1], counts, source=source, labels={"of": "one module at one degree"})

    @cache
    def order(module: str, shape: ModuleShape | None) -> list[int]:
        return adaptive_order(curves, module, shape)

    def adaptive(modules: Sequence[str], count: int, shapes: Mapping[str, ModuleShape]) -> list[float]:
        asked = ((module, shapes.get(module)) for module in modules)
        return _all(_errors(curves, module, order(module, shape)[:count], shape) for module, shape in asked)

    least = statistics.fmean(_all(paper[module] for module in choose) or [0.0])
    errors = {count: adaptive(choose, count, shapes) for count in TRIED_COUNTS}
    good = [count for count, found in errors.items() if found and statistics.fmean(found) <= least]
    if not good:
        yield from absent(names[2:], f"no number of samples up to {TRIED_COUNTS[-1]} gave it", source=source)
        return
    labels = {"tried": ", ".join(map(str, TRIED_COUNTS))}
    yield mean_figure(names[2], [float(good[0])], source=source, labels=labels)
    for name, of in zip(names[3:], (shapes, {}), strict=True):
        yield mean_figure(name, adaptive(judge, good[0], of), source=source)


def adaptive_order(curves: Curves, module: str, shape: ModuleShape | None) -> list[int]:
    """Returns the quotas at which adaptive sampling measures a module, in order."""
    phases = [phase for name, phase in curves if name == module]
    every = sorted(set.intersection(*(set(curves[module, phase]) for phase in phases)))
    taken: list[Sample] = []
    order: list[int] = []
    while len(order) < TRIED_COUNTS[-1]:
        if shape is not None:
            quota = next_shaped_sample(taken, every, shape, bound=1e-9)
        else:
            quota = next_of_both(taken, every, bound=1e-9)
        if quota is None:
            break
        order.append(quota)
        taken += [curves[module, phase][quota] for phase in phases]
    return order


def _errors(curves: Curves, module: str, quotas: Sequence[int], shape: ModuleShape | None) -> list[float]:
    """Relative errors between the first and last of the quotas, where nothing was sampled."""
    phases = [phase for name, phase in curves if name == module]
    used = [quota for quota in quotas if all(quota in curves[module, phase] for phase in phases)]
    errors = []
    for phase in phases:
        mine = [curves[module, phase][quota] for quota in used]
        others = [curves[module, other][quota] for other in phases if other is not phase for quota in used]
        surface = ShapedSurface(mine, shape=shape, others=others)
        held = [s for q, s in curves[module, phase].items() if min(used) < q < max(used) and q not in used]
        errors += [abs(surface.time_ms(1, s.quota) / s.median_ms - 1) for s in held]
    return errors


def _all(found: Iterable[Sequence[float]]) -> list[float]:
    return [one for of in found for one in of]
