"""How far scaling surfaces are off where nothing was measured, with and without the shape of counted operators.

Three sets: the points of each module that its surface goes through; modules by whose other points one of the two ways
is chosen; and modules that judge both ways and the chosen one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.cost.alone.sampling import sampling_figures, sampling_names
from bench.cost.figures import mean_figure
from bench.cost.ground import HELD_DEGREE, Ground
from bench.record import Figure, Source
from mosaic.cost import ShapedSurface
from mosaic.errors import InvalidProfileError
from mosaic.profile import Sample
from mosaic.profiler.quotas import default_quotas
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
    yield from sampling_figures(
        (*truth.fit, *(sample for held in truth.held.values() for sample in held)),
        truth.shapes,
        grid=truth.grid,
        choose=truth.choose,
        judge=truth.judge,
        source=truth.source,
        head=truth.head,
    )


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
