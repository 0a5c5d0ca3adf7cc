"""Gains of the exact plan on the six models themselves: operators counted on tensors without data, times predicted.

Unlike Table 1's rows (``solver_gains.py``), nothing here is drawn: a model has as many samples as numbers of GPUs.
Memory is checked stage by stage for all alike, since the other planners know no more. Counted in bfloat16, as GPUs
train; modules side by side share the memory's bandwidth as ``AnalyticCost`` assumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.record import Figure, one_line
from bench.solver.gains import PAPER, RIVALS
from bench.solver.runs import figure, predicted_steps
from mosaic.cli.counting import count_workload
from mosaic.cost.analytic_cost import AnalyticCost
from mosaic.cost.degrees import degrees_to_look_at
from mosaic.cost.precision import Dtype
from mosaic.errors import InfeasibleError
from mosaic.hardware import find_cluster
from mosaic.models import PAPER_MODELS

DEVICE = "h100-80g"
DTYPE: Dtype = "bfloat16"


def gains_of_models(
    *, size: str, batch: int, num_devices: Sequence[int], seconds: float, models: Sequence[str] = PAPER_MODELS
) -> Iterator[Figure]:
    """Ratios of predicted step times, rival over exact, one sample for each number of GPUs on which the model fits."""
    degrees = degrees_to_look_at(max(num_devices))
    for model in models:
        samples: dict[str, list[float]] = {rival: [] for rival in RIVALS}
        reason = ""
        counted = count_workload(f"zoo:{model}-{size}:{batch}", degrees, kind="cuda", dtype=DTYPE)
        for count in num_devices:
            cluster = find_cluster(DEVICE, count)
            try:
                times = predicted_steps(
                    counted.graph,
                    AnalyticCost(counted.counts, cluster),
                    cluster.hardware.device(),
                    num_devices=count,
                    methods=(*RIVALS, "exact"),
                    seconds=seconds,
                    hold_memory=False,
                )
            except InfeasibleError as error:
                reason = f"{count} GPUs: {one_line(error, most=200)}"
                continue
            for rival in RIVALS:
                if rival in times and "exact" in times:
                    samples[rival].append(times[rival] / times["exact"])
        of = f"{model} ({size}, batch {batch}, {counted.dtype}, {len(counted.graph.names)} modules, {DEVICE})"
        for rival in RIVALS:
            yield figure(
                f"gain of exact over {rival}, {of}, {_these(num_devices)} GPUs, median",
                samples[rival],
                "predicted",
                paper=PAPER.get(rival, ""),
                reason="" if samples[rival] else reason or "that planner made no plan of it",
            )


def _these(num_devices: Sequence[int]) -> str:
    return ", ".join(map(str, num_devices))
