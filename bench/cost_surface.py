"""How far scaling surfaces of the paper's grid are off where nothing was measured, measured and simulated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bench.cost.figures import SLOTS, mean_figure
from bench.cost.ground import FIT_DEGREES, HELD_DEGREE, Ground
from bench.cost.sampling import curves_of, sampling_figures
from bench.cost.truth import DEVICES, counted_modules, described, simulated_samples
from bench.record import Figure
from mosaic.cost import ShapedSurface, shape_of
from mosaic.errors import InvalidProfileError
from mosaic.profile import Sample
from mosaic.shape import ModuleShape

AT_QUOTAS = "surface error at held-out quotas"
AT_DEGREES = "surface error at a held-out degree"
REPEATED = "difference of the same points measured twice"
_NOISE = 0.01


def surface_errors(
    fit: Sequence[Sample], held: Sequence[Sample], shapes: Mapping[str, ModuleShape] | None = None
) -> list[float]:
    """Returns relative errors of surfaces at held-out samples, of all modules and phases.

    Args:
        fit: Samples that are fitted.
        held: Samples to judge by.
        shapes: What counted operators say of the modules, where they were counted.

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
            others = [s for s in fit if s.module == module and s.phase is not phase]
            surface = ShapedSurface(mine, shape=(shapes or {}).get(module), others=others)
        except InvalidProfileError:  # a phase that never ran
            continue
        errors += [abs(surface.time_ms(s.degree, s.quota) / s.median_ms - 1) for s in theirs]
    return errors


def measure_surface(ground: Ground) -> Iterator[Figure]:
    """Judges surfaces by samples taken after all that were fitted."""
    fit, later = ground.profile.samples, ground.later.samples
    shapes = {shape.module: shape for shape in ground.profile.shapes}
    held = [s for s in later if s.degree == 1 and s.quota in ground.held_quotas]
    why = f"this machine has {ground.num_slots} {ground.unit}: every quota is at an end of the surface"
    yield mean_figure(AT_QUOTAS, surface_errors(fit, held, shapes), source="measured", reason=why)
    held = [s for s in later if s.degree == HELD_DEGREE]
    labels = {"degree": str(HELD_DEGREE), "of": "one replica's share of the batch, without communication"}
    yield mean_figure(AT_DEGREES, surface_errors(fit, held, shapes), source="measured", labels=labels)
    first = {(s.module, s.phase, s.quota): s for s in fit if s.degree == 1 and s.times_ms}
    pairs = [(first.get((s.module, s.phase, s.quota)), s) for s in later if s.degree == 1 and s.times_ms]
    again = [abs(a.median_ms / b.median_ms - 1) for a, b in pairs if a is not None and b.median_ms > 0]
    yield mean_figure(REPEATED, again, source="measured", labels={"is": "the least error that any model can show here"})


def simulate_surface() -> Iterator[Figure]:
    """Judges surfaces and sampling by devices that are unlike their description, cut into 16 slots and into 66."""
    for num_slots in SLOTS:
        head = f"simulated ({num_slots} slots): "
        grid = tenths(num_slots)
        hardware, quotas = described(num_slots), range(1, num_slots + 1)
        shapes = {
            name: shape
            for name, counts in counted_modules().items()
            if (shape := shape_of(name, {1: counts[1]}, hardware, quotas)) is not None
        }
        at_quotas: list[float] = []
        at_degrees: list[float] = []
        devices = []
        for device in DEVICES[num_slots]:
            dice = random.Random(1000 * device + num_slots)
            truth = [s for d in (*FIT_DEGREES, HELD_DEGREE) for s in simulated_samples(num_slots, d, device)]
            seen = [_noisy(sample, dice) for sample in truth]
            fit = [s for s in seen if s.quota in grid and s.degree in FIT_DEGREES]
            inside = [s for s in truth if grid[0] <= s.quota <= grid[-1]]
            at_quotas += surface_errors(fit, [s for s in inside if s.quota not in grid and s.degree == 1], shapes)
            at_degrees += surface_errors(fit, [s for s in inside if s.degree == HELD_DEGREE], shapes)
            devices.append(tuple(curves_of(s for s in of if s.degree == 1) for of in (seen, truth)))
        yield mean_figure(head + AT_QUOTAS, at_quotas, source="simulated")
        yield mean_figure(head + AT_DEGREES, at_degrees, source="simulated")
        yield from sampling_figures(devices, shapes, grid, source="simulated", head=head)


def _noisy(sample: Sample, dice: random.Random) -> Sample:
    return replace(sample, times_ms=tuple(time * dice.lognormvariate(0, _NOISE) for time in sample.times_ms))


def tenths(num_slots: int) -> tuple[int, ...]:
    """Returns the slots nearest to tenths of a device."""
    return tuple(sorted({max(1, round(tenth / 10 * num_slots)) for tenth in range(1, 11)}))
