"""Proofs: the share of instances that the exact search settles, in what time, and the gaps of the rest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.record import Figure
from bench.solver.generate import SHAPES, Recipe, Shape, generate
from bench.solver.runs import Searched, figure, search, two_at_a_time

WITH_BACKBONE: tuple[Shape, ...] = ("star", "layered", "multi")


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
    times = [one.seconds for one in found]
    return [
        figure(
            f"{of}: proven optimal within {seconds:g} s, share of instances",
            [float(one.is_proven) for one in found],
            "measured",
            statistic=statistics.fmean,
        ),
        figure(f"{of}: search time, median, s", times, "measured"),
        figure(f"{of}: search time, worst, s", times, "measured", statistic=max),
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
