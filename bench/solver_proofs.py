"""How often, how soon and how nearly the exact search proves its plan best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.record import Figure
from bench.solver.generate import SHAPES, Recipe, Shape, generate
from bench.solver.runs import Searched, figure, search, two_at_a_time

WITH_BACKBONE: tuple[Shape, ...] = ("star", "layered", "multi")
NEAR = 0.02


def ten_modules(*, seeds: int, seconds: float, disturbed: bool) -> list[Figure]:
    """Ten modules on eight GPUs in steps of 10 %, every shape, memory loose and tight; one at a time."""
    recipes = [
        Recipe(shape=shape, num_modules=10, tight_memory=tight, disturbed=disturbed, seed=seed)
        for shape in SHAPES
        for tight in (False, True)
        for seed in range(seeds)
    ]
    found = [search(generate(recipe), seconds=seconds) for recipe in recipes]
    of = "10 modules, 8 GPUs, 10 %" + (", with interference" if disturbed else "")
    paper = "15.87 s" if not disturbed else "15.87 s (its model has interference)"
    times = [one.seconds for one in found]
    return [
        figure(
            f"{of}: proven optimal within {seconds:g} s, share of instances",
            [float(one.is_proven) for one in found],
            "measured",
            statistic=statistics.fmean,
        ),
        figure(f"{of}: search time, median, s", times, "measured", paper=paper),
        figure(f"{of}: search time, worst, s", times, "measured", statistic=max, paper=paper),
    ]


def twenty_modules(*, seeds: int, seconds: float = 5.0) -> list[Figure]:
    """Twenty modules on 8 and 32 GPUs: how far plan and bound are apart after five seconds."""
    figures = []
    for num_devices in (8, 32):
        for kind, shapes in (("with a backbone", WITH_BACKBONE), ("purely parallel", ("align",))):
            found = _searched(20, num_devices, shapes, seeds, seconds)
            of = f"20 modules, {num_devices} GPUs, {kind}: proven gap within {seconds:g} s"
            gaps = [one.gap * 100 for one in found]
            figures += [
                figure(f"{of}, median, %", gaps, "simulated"),
                figure(f"{of}, worst, %", gaps, "simulated", statistic=max),
            ]
            if len(shapes) > 1:
                figures += [
                    figure(f"{of}, {shape}, median, %", _gaps_of(found, shape), "simulated") for shape in shapes
                ]
    return figures


def _searched(
    num_modules: int, num_devices: int, shapes: Sequence[Shape], seeds: int, seconds: float
) -> list[Searched]:
    recipes = [
        Recipe(shape=shape, num_modules=num_modules, num_devices=num_devices, seed=seed)
        for shape in shapes
        for seed in range(seeds)
    ]
    return two_at_a_time(lambda recipe: search(generate(recipe), seconds=seconds), recipes)


def _gaps_of(found: Sequence[Searched], shape: str) -> list[float]:
    return [one.gap * 100 for one in found if one.instance.startswith(shape)]


def sixty_four_modules(*, seeds: int, limits: Sequence[float]) -> list[Figure]:
    """Sixty-four modules on 32 GPUs: the first of rising time limits at which the gap is within 2 %.

    An instance that is not there at the last limit counts with that, which leaves the median what it is as long as
    these are fewer than half.
    """
    recipes = [
        Recipe(shape=shape, num_modules=64, num_devices=32, seed=seed)
        for shape in (*WITH_BACKBONE, "align")
        for seed in range(seeds)
    ]
    found = two_at_a_time(lambda recipe: _first_near(recipe, limits), recipes)
    times = [last.seconds for _, last in found]
    gaps = [last.gap * 100 for _, last in found]
    missed = sum(seconds is None for seconds, _ in found)
    reason = ""
    if 2 * missed >= len(found):
        reason = f"{missed} of {len(found)} instances were not within 2 % of the bound after {limits[-1]:g} s"
    return [
        figure(
            "64 modules, 32 GPUs: time to within 2 % of the bound, median, s",
            [] if reason else times,
            "measured",
            reason=reason,
        ),
        figure(f"64 modules, 32 GPUs: gap after at most {limits[-1]:g} s, median, %", gaps, "simulated"),
        figure(
            f"64 modules, 32 GPUs: within 2 % of the bound after {limits[-1]:g} s, share of instances",
            [float(seconds is not None) for seconds, _ in found],
            "measured",
            statistic=statistics.fmean,
        ),
    ]


def _first_near(recipe: Recipe, limits: Sequence[float]) -> tuple[float | None, Searched]:
    instance = generate(recipe)
    for seconds in limits:
        found = search(instance, seconds=seconds, kicks=30)
        if found.gap <= NEAR:
            return found.seconds, found
    return None, found
