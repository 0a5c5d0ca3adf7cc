"""Analytic profiles of the zoo's models on H100s: times of modules at every degree and quota, from counted work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType

from mosaic.cost.communication import ModuleTraffic
from mosaic.cost.degrees import degrees_to_look_at
from mosaic.graph import ModuleGraph
from mosaic.models import PAPER_MODELS
from mosaic.profile import Phase

DEVICE = "h100-80g"
BATCH = 32
QWEN_BATCH = 256
"""Of each of QWen-VAL's three tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """One module."""

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

    model: str
    """Its name and size in the zoo."""
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


@cache
def load_table(name: str) -> ModelTable:
    """Counts a model of ``TABLES``, once a process."""
    return TABLES[name]()


def count(name: str, size: str, batch: int, num_devices: int) -> ModelTable:
    """Counts a model of the zoo in bfloat16 by autocast, as ``mosaic plan`` does, at every degree for so many GPUs."""
    import torch

    from mosaic import models
    from mosaic.cli.counting import count_modules
    from mosaic.cli.workload import Workload
    from mosaic.cost.analytic_cost import AnalyticCost
    from mosaic.hardware import find_cluster

    meta, degrees = torch.device("meta"), degrees_to_look_at(num_devices)
    workload = Workload(
        model=models.build(name, size, device=meta),
        sample=models.make_batch(name, size, batch=batch, device=meta),
        loss=models.loss_of,
        modules=models.find_model(name).modules,
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
        model=f"{name}-{size}",
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


TABLES: Mapping[str, Callable[[], ModelTable]] = MappingProxyType(
    {
        **{f"qwen-val-{size}": partial(count, "qwen-val", size, QWEN_BATCH, 256) for size in ("30b", "70b")},
        **{name: partial(count, name, "paper", BATCH, 32) for name in PAPER_MODELS},
        **{
            f"{name}-table1": partial(count, name, "table1", BATCH, 32)
            for name in ("ofasys", "imagebind", "qwen3-vl", "unified-io-2")
        },
    }
)
"""By name."""
