"""Analytic profiles of the zoo's models on H100s: times of modules at every degree and quota, counted once and kept.

``python -m bench.ranks.layer_tables [NAME ...]`` counts operators on tensors without data (minutes) and writes
``bench/analytic/NAME.json``; the simulated part of ``bench_ranks`` reads these. Nothing in them is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from mosaic.artifact import load, save
from mosaic.cost.communication import ModuleTraffic
from mosaic.cost.degrees import degrees_to_look_at
from mosaic.device import FORBID_EXTRA
from mosaic.graph import ModuleGraph
from mosaic.profile import Phase

FOLDER = Path(__file__).resolve().parents[1] / "analytic"
DEVICE = "h100-80g"
BATCH = 32
QWEN_BATCH = 256
"""Of each of QWen-VAL's three tasks."""
QWEN_MODULES = ("embed_tokens", "visual", "audio", "language_model", "lm_head")
"""Named, since with few layers the finder chooses others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """One module."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    module: str
    """Name in the graph."""
    forward_ms: tuple[tuple[float, ...], ...]
    """By degree, then by quota from one slot on; without communication."""
    backward_ms: tuple[tuple[float, ...], ...]
    """The same; without the sum of gradients."""
    memory_bytes: tuple[int, ...]
    """By degree."""
    kept_bytes: tuple[int, ...]
    """By degree."""
    traffic: ModuleTraffic
    """Of the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """One model."""

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
    model: str
    """Its name in the zoo, and what was changed."""
    batch: int
    """Samples on all devices; of each task, where there are several."""
    device: str
    """What the times are of."""
    degrees: tuple[int, ...]
    """Rising."""
    graph: ModuleGraph
    """Which feeds which."""
    modules: tuple[ModuleTable, ...]
    """In the graph's order."""


def path_of(name: str) -> Path:
    """Returns where a model's table is kept."""
    return FOLDER / f"{name}.json"


def load_table(name: str) -> ModelTable:
    """Reads a kept table."""
    return load(ModelTable, path_of(name))


def count(
    name: str,
    config: Any,
    batch: int,
    degrees: Sequence[int],
    *,
    described: str = "",
    modules: tuple[str, ...] | None = None,
) -> ModelTable:
    """Counts a model of the zoo at a configuration, in bfloat16 by autocast, as ``mosaic plan`` does.

    Args:
        name: In the zoo.
        config: Of the model.
        batch: Samples.
        degrees: Data-parallel degrees.
        described: What the table calls it; by default its name.
        modules: Those to place; by default the zoo's, or those that the finder chooses.
    """
    import torch

    from mosaic import models
    from mosaic.cli.counting import count_modules
    from mosaic.cli.workload import Workload
    from mosaic.cost.analytic_cost import AnalyticCost
    from mosaic.hardware import find_cluster

    meta, found = torch.device("meta"), models.find_model(name)
    workload = Workload(
        model=models.build(name, config=config, device=meta),
        sample=models.make_batch(name, config=config, batch=batch, device=meta),
        loss=found.loss,
        modules=modules or found.modules,
        batch=batch,
    )
    counted = count_modules(workload, degrees, kind="cuda", dtype="bfloat16")
    cost = AnalyticCost(counted.counts, find_cluster(DEVICE, max(degrees)))
    quotas = range(1, cost.hardware.num_slots + 1)

    def times(module: str, phase: Phase) -> tuple[tuple[float, ...], ...]:
        def own(degree: int) -> float:
            return cost.communication_ms(module, degree) if phase is Phase.BACKWARD else 0.0

        return tuple(
            tuple(float(f"{cost.time_ms(module, phase, degree, quota) - own(degree):.5g}") for quota in quotas)
            for degree in degrees
        )

    return ModelTable(
        model=described or name,
        batch=batch,
        device=DEVICE,
        degrees=tuple(degrees),
        graph=counted.graph,
        modules=tuple(
            ModuleTable(
                module=module,
                forward_ms=times(module, Phase.FORWARD),
                backward_ms=times(module, Phase.BACKWARD),
                memory_bytes=tuple(cost.memory_bytes(module, degree) for degree in degrees),
                kept_bytes=tuple(cost.kept_bytes(module, degree) for degree in degrees),
                traffic=counted.traffic[module],
            )
            for module in counted.graph.names
        ),
    )


def with_layers(one: ModelTable, two: ModelTable, layers: Mapping[str, int], described: str) -> ModelTable:
    """Returns the table of a model with more layers from those with one and with two of them.

    Layers are alike, so each takes what the second one added.
    """

    def of(module: str, first: Any, second: Any) -> Any:
        if isinstance(first, tuple):
            return tuple(of(module, a, b) for a, b in zip(first, second, strict=True))
        found = first + (layers[module] - 1) * (second - first)
        return max(0, found) if isinstance(first, int) else float(f"{max(0.0, found):.5g}")

    made = []
    for a, b in zip(one.modules, two.modules, strict=True):
        if a.module not in layers:
            made.append(a)
            continue
        gradients = of(a.module, a.traffic.parameter_gradients, b.traffic.parameter_gradients)
        fields = {
            field: of(a.module, getattr(a, field), getattr(b, field))
            for field in ("forward_ms", "backward_ms", "memory_bytes", "kept_bytes")
        }
        made.append(replace(a, **fields, traffic=replace(a.traffic, parameter_gradients=gradients)))
    return replace(one, modules=tuple(made), model=described)


def _zoo(name: str, size: str) -> Callable[[], ModelTable]:
    def make() -> ModelTable:
        from mosaic import models

        described = f"{name}-{size}"
        return count(name, models.config_of(name, size), BATCH, degrees_to_look_at(32), described=described)

    return make


def _qwen(described: str, layers: int, width: int, heads: int, mlp: int) -> Callable[[], ModelTable]:
    """QWen-VAL with the language model of a LLaMA of that size; Spindle gives no dimensions."""

    def make() -> ModelTable:
        from mosaic import models

        published = models.config_of("qwen-val", "paper")
        tables = []
        for few in (1, 2):
            language = replace(published.language.shape, layers=few, width=width, heads=heads, mlp=mlp)
            config = replace(
                published,
                vision=replace(published.vision, layers=few),
                audio=replace(published.audio, layers=few),
                adapter=replace(published.adapter, width=width, heads=heads),
                language=replace(published.language, shape=language),
            )
            tables.append(count("qwen-val", config, QWEN_BATCH, degrees_to_look_at(256), modules=QWEN_MODULES))
        numbers = {"visual": published.vision.layers, "audio": published.audio.layers, "language_model": layers}
        return with_layers(tables[0], tables[1], numbers, described)

    return make


TABLES: Mapping[str, Callable[[], ModelTable]] = MappingProxyType(
    {
        "qwen-val-30b": _qwen("qwen-val, language model of 60 x 6656 as LLaMA 30B's", 60, 6656, 52, 17_920),
        "qwen-val-70b": _qwen("qwen-val, language model of 80 x 8192 as LLaMA 70B's", 80, 8192, 64, 28_672),
        **{name: _zoo(name, "paper") for name in ("ofasys", "clip", "imagebind", "qwen3-vl", "unified-io-2", "ctvlm")},
        **{f"{name}-table1": _zoo(name, "table1") for name in ("ofasys", "imagebind", "qwen3-vl", "unified-io-2")},
    }
)
"""By name of the file."""


def main() -> None:
    """Counts and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(TABLES)}; all by default")
    for name in parser.parse_args().names or TABLES:
        save(TABLES[name](), path_of(name))
        print(f"wrote {path_of(name).name}", flush=True)


if __name__ == "__main__":
    main()
