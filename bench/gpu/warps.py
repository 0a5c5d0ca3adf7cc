"""Warps in flight while a model trains, by the device's counters: the paper's Fig. 10, of one GPU."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.bench import Bench
from bench.gpu.models.measure import even_plan
from bench.gpu.models.variants import Step, Workload, colocated
from bench.record import Figure, missing_figure
from mosaic.engine import find_modules
from mosaic.profiler import Counters, open_counters

WINDOW_S = 1.0
NAMES = ("sm_occupancy", "sm_util", "dram_bandwidth")
"""The first is the share of all warps that were active."""


def measure_warps(
    bench: Bench, *, name: str = "clip", batch: int = 8, counters: Counters | None = None
) -> Iterator[Figure]:
    """Reads the counters over steps of the plain loop, and of the even split on green lanes, in per cent.

    Where there are none, or nobody may read them, the figure has the reason. ``counters`` are the device's by default.
    """
    counters = counters or open_counters(bench.backend)
    if counters is None:
        yield missing_figure(f"{NAMES[0]}_percent", "the host has no such counters", {"model": name})
        return
    with counters:
        if counters.missing:
            yield missing_figure(f"{NAMES[0]}_percent", counters.missing, {"model": name})
            return
        work = Workload(name, batch, bench)
        plan = even_plan(find_modules(work.model, work.loss, include=work.modules).graph, bench.device)
        with colocated(work, plan, bench.backend) as (plain, green):
            for loop, step in {"plain": plain, "green lanes": green}.items():
                yield from _read(counters, bench, step, {"model": name, "loop": loop})


def _read(counters: Counters, bench: Bench, step: Step, labels: dict[str, str]) -> Iterator[Figure]:
    for _ in range(2):
        step()
    bench.synchronize()
    seen = counters.during(lambda: (step(), bench.synchronize()), WINDOW_S)
    for name in NAMES:
        value = getattr(seen, name, None)
        if value is None:
            yield missing_figure(f"{name}_percent", "NVML gave no value at the end of the window", labels)
        else:
            yield Figure(name=f"{name}_percent", source="measured", value=100 * value, labels=labels)
