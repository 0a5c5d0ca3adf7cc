"""How far scaling surfaces are off where nothing was measured, and how many measurements they take.

Three sets: the points of each module that its surface goes through; modules by whose other points a way is chosen, with
or without the shape of counted operators, and by which adaptive sampling is stopped; and modules that judge.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from bench.cost.estimates import absent, mean_figure
from bench.cost.ground import HELD_DEGREE, Ground
from bench.record import Figure, Source
from mosaic.cost import ShapedSurface
from mosaic.cost.surfaces import next_of_both, next_shaped_sample
from mosaic.errors import InvalidProfileError
from mosaic.profile import Phase, Sample
from mosaic.profiler import default_quotas
from mosaic.shape import ModuleShape

AT_QUOTAS, AT_DEGREES = "surface error at held-out quotas", "surface error at a held-out degree"
REPEATED = "difference of the same points measured twice"
PLAIN, SHAPED = "interpolated (no prior)", "shaped by counted operators"
CHOSEN = "the way chosen on other modules"

Shapes = Mapping[str, ModuleShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfaceTruth:
    """Times of modules alone."""

    source: Source
    """``simulated`` or ``measured``."""
    head: str
    """Put before the names of figures."""
    fit: tuple[Sample, ...]
    """Points that surfaces go through."""
    held: Mapping[str, tuple[Sample, ...]]
    """Points that judge, by what they are (``AT_QUOTAS``, ``AT_DEGREES``)."""
    shapes: Shapes
    """What counted operators say of the modules."""
    choose: tuple[str, ...]
    """Modules to choose by."""
    judge: tuple[str, ...]
    """Modules that judge."""
    grid: tuple[int, ...]
    """Quotas that the paper's grid would measure."""


def surface_names(head: str = "") -> tuple[str, ...]:
    """Returns the names of the figures of one truth."""
    errors = (f"{head}{what}, {way}" for what in (AT_QUOTAS, AT_DEGREES) for way in (PLAIN, SHAPED, CHOSEN))
    return (*errors, *sampling_names(head))


def judge_surfaces(truth: SurfaceTruth) -> Iterator[Figure]:
    """Yields errors of both ways and of the chosen one, and what sampling takes."""
    points: dict[str, int] = {}
    for sample in truth.fit:
        points[sample.module] = points.get(sample.module, 0) + 1
    measured = f"{statistics.fmean(points.values()):.3g} a module" if points else "none"
    for what, held in truth.held.items():
        errors = {way: surface_errors(truth.fit, held, shapes) for way, shapes in ((PLAIN, {}), (SHAPED, truth.shapes))}
        for_choice = {way: _of(found, truth.choose) for way, found in errors.items()}
        chosen = min(for_choice, key=lambda way: statistics.fmean(for_choice[way] or (0.0,)))
        for way, of in (*((way, way) for way in errors), (CHOSEN, chosen)):
            labels = {"points measured": measured, "way": of}
            why = "every quota is at an end of the surface, or was measured"
            yield mean_figure(
                f"{truth.head}{what}, {way}",
                _of(errors[of], truth.judge),
                source=truth.source,
                labels=labels,
                reason=why,
            )
    yield from sampling_figures(truth)


def surface_errors(fit: Sequence[Sample], held: Sequence[Sample], shapes: Shapes) -> dict[str, list[float]]:
    """Returns relative errors of surfaces at held-out samples, by module.

    Args:
        fit: Samples that are fitted.
        held: Samples to judge by.
        shapes: What counted operators say of the modules, where they were counted.

    Raises:
        ValueError: A point is fitted and held out.
    """
    points = {(s.module, s.phase, s.degree, s.quota) for s in fit}
    both = points & {(s.module, s.phase, s.degree, s.quota) for s in held}
    if both:
        raise ValueError(f"{len(both)} points are fitted and held out, such as {min(both)}")
    errors: dict[str, list[float]] = {}
    for module, phase in sorted({(s.module, s.phase) for s in held}):
        mine = [s for s in fit if (s.module, s.phase) == (module, phase)]
        theirs = [s for s in held if (s.module, s.phase) == (module, phase) and s.times_ms and s.median_ms > 0]
        try:
            others = [s for s in fit if s.module == module and s.phase is not phase]
            surface = ShapedSurface(mine, shape=shapes.get(module), others=others)
        except InvalidProfileError:  # a phase that never ran
            continue
        errors.setdefault(module, []).extend(abs(surface.time_ms(s.degree, s.quota) / s.median_ms - 1) for s in theirs)
    return errors


def _of(errors: Mapping[str, Sequence[float]], modules: Sequence[str]) -> list[float]:
    return [error for module in modules for error in errors.get(module, ())]


def measure_surface(ground: Ground) -> Iterator[Figure]:
    """Judges surfaces by samples taken after all that were fitted."""
    fit, later = ground.profile.samples, ground.later.samples
    truth = SurfaceTruth(
        source="measured",
        head="",
        fit=tuple(fit),
        held={
            AT_QUOTAS: tuple(s for s in later if s.degree == 1 and s.quota in ground.held_quotas),
            AT_DEGREES: tuple(s for s in later if s.degree == HELD_DEGREE),
        },
        shapes={shape.module: shape for shape in ground.profile.shapes},
        choose=ground.names[0::2],
        judge=ground.names[1::2],
        grid=tuple(default_quotas(ground.bench.device)),
    )
    yield from judge_surfaces(truth)
    first = {(s.module, s.phase, s.quota): s for s in fit if s.degree == 1 and s.times_ms}
    pairs = [(first.get((s.module, s.phase, s.quota)), s) for s in later if s.degree == 1 and s.times_ms]
    again = [abs(a.median_ms / b.median_ms - 1) for a, b in pairs if a is not None and b.median_ms > 0]
    yield mean_figure(REPEATED, again, source="measured", labels={"is": "the least error that any model can show here"})


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


def sampling_figures(truth: SurfaceTruth) -> Iterator[Figure]:
    """Replays both ways of sampling over everything that was measured of a module."""
    source, grid, choose, judge = truth.source, truth.grid, truth.choose, truth.judge
    curves = curves_of((*truth.fit, *(sample for held in truth.held.values() for sample in held)))
    names = sampling_names(truth.head)
    if not any(len(of) > len(grid) for of in curves.values()):
        yield from absent(names, "the grid has every quota of this device: there is nothing to choose", source=source)
        return
    paper = {module: _errors(curves, module, grid, {}) for module in (*choose, *judge)}
    yield mean_figure(names[0], _of(paper, judge), source=source)
    counts = [float(len([q for q in grid if all(q in of for of in curves.values())]))]
    yield mean_figure(names[1], counts, source=source, labels={"of": "one module at one degree"})

    @cache
    def order(module: str, shape: ModuleShape | None) -> list[int]:
        return adaptive_order(curves, module, shape)

    def adaptive(modules: Sequence[str], count: int, shapes: Shapes) -> list[float]:
        taken = {module: order(module, shapes.get(module))[:count] for module in modules}
        return _of({module: _errors(curves, module, quotas, shapes) for module, quotas in taken.items()}, modules)

    least = statistics.fmean(_of(paper, choose) or [0.0])
    errors = {count: adaptive(choose, count, truth.shapes) for count in TRIED_COUNTS}
    good = [count for count, found in errors.items() if found and statistics.fmean(found) <= least]
    if not good:
        yield from absent(names[2:], f"no number of samples up to {TRIED_COUNTS[-1]} gave it", source=source)
        return
    labels = {"tried": ", ".join(map(str, TRIED_COUNTS))}
    yield mean_figure(names[2], [float(good[0])], source=source, labels=labels)
    for name, of in zip(names[3:], (truth.shapes, {}), strict=True):
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


def _errors(curves: Curves, module: str, quotas: Sequence[int], shapes: Shapes) -> list[float]:
    """Relative errors between the first and last of the quotas, where nothing was sampled."""
    phases = [phase for name, phase in curves if name == module]
    used = [quota for quota in quotas if all(quota in curves[module, phase] for phase in phases)]
    every = [sample for phase in phases for sample in curves[module, phase].values()]
    held = [one for one in every if min(used) < one.quota < max(used) and one.quota not in used]
    return _of(surface_errors([one for one in every if one.quota in used], held, shapes), (module,))
