"""Gains of the exact plan over the planners that the paper compares with, all under one cost model. Simulated."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from bench.figures.papers.read import printed
from bench.record import Figure
from bench.solver.generate import Recipe, build, generate
from bench.solver.runs import figure, predicted_steps
from bench.solver.table_1 import BACKBONES, ENCODERS
from mosaic.solver.instance import Instance, TableCost

PAPER = printed("mosaic", "Fig. 9")
"""Over all of the paper's models, as they trained on GPUs."""
RIVALS = ("gahc", "megatron", "distmm", "spindle")

MODELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Qwen3-VL": ("qwen3vl_vision", "qwen3vl_text", "qwen3vl_llm"),
        "Unified-IO 2": ("uio2_vision", "uio2_audio", "uio2_text", "uio2_llm"),
        "ImageBind": ("imagebind_vision", "imagebind_audio", "imagebind_text"),
        "OFASys": ("ofasys_vision", "ofasys_text", "ofasys_audio", "ofasys_llm"),
    }
)
"""Rows of Table 1; encoders feed the language model, where there is one."""
WITHOUT_ROWS = ("CLIP", "CTVLM")
"""Models of the paper of which its Table 1 has no rows."""


def model(name: str, *, num_devices: int = 8, seed: int = 0, disturbed: bool = True) -> Instance:
    """Returns a model of Table 1, its modules' work drawn around the table's."""
    rows = {kind.name: kind for kind in (*BACKBONES, *ENCODERS)}
    kinds = [rows[row] for row in MODELS[name]]
    waits: list[tuple[int, ...]] = [()] * len(kinds)
    if kinds[-1] in BACKBONES:
        waits[-1] = tuple(range(len(kinds) - 1))
    recipe = Recipe(shape="star", num_modules=len(kinds), num_devices=num_devices, disturbed=disturbed, seed=seed)
    return build(recipe, kinds, waits, random.Random(f"{name} {seed}"), name=f"{name}-{num_devices}-{seed}")


def gains(*, seeds: int, num_modules: int, seconds: float) -> Iterator[Figure]:
    """Ratios of step times, rival over exact, for each model and for generated shapes."""
    for name in WITHOUT_ROWS:
        for rival in RIVALS:
            reason = f"Table 1 has no rows of {name} to draw modules from; see the figures of the six models"
            yield figure(_gain(rival, name), [], "simulated", paper=PAPER.get(rival, ""), reason=reason)
    for name in MODELS:
        yield from _figures(name, [model(name, seed=seed) for seed in range(seeds)], seconds, paper=PAPER)
    for shape in ("star", "align", "multi", "layered"):
        made = [generate(Recipe(shape=shape, num_modules=num_modules, seed=seed)) for seed in range(seeds)]
        yield from _figures(f"{num_modules} modules {shape}", made, seconds)


def _gain(rival: str, of: str) -> str:
    return f"gain of exact over {rival}, {of}, 8 GPUs, median"


def ratios(instance: Instance, *, seconds: float, methods: Sequence[str] = RIVALS) -> dict[str, float]:
    """Returns the step time of each rival over that of the exact plan; what a rival cannot do is left out."""
    times = predicted_steps(
        instance.graph,
        TableCost(instance),
        instance.device,
        num_devices=instance.num_devices,
        methods=(*methods, "exact"),
        seconds=seconds,
    )
    return {method: times[method] / times["exact"] for method in methods if method in times}


def _figures(
    of: str, instances: Sequence[Instance], seconds: float, *, paper: Mapping[str, str] = MappingProxyType({})
) -> list[Figure]:
    samples: dict[str, list[float]] = defaultdict(list)
    for instance in instances:
        for rival, ratio in ratios(instance, seconds=seconds).items():
            samples[rival].append(ratio)
    return [
        figure(
            _gain(rival, of),
            samples[rival],
            "simulated",
            paper=paper.get(rival, ""),
        )
        for rival in RIVALS
    ]
