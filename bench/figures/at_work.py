"""How much of the SMs' time a plan puts to work: Mosaic's Fig. 4b and 10 as far as a cost model can say.

The paper counts compute warps in flight. No warp is counted here: a module's work on a device is the least SM time that
the cost model knows for it there, at whatever quota that is, so SMs that a module holds and cannot use do not count,
and neither does time in which rows or gradients travel. Warps that wait for memory are in flight and are not at work.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from bench.ranks.__main__ import TOO_LARGE
from bench.ranks.layer_tables import ModelTable, load_table
from bench.ranks.simulated import ModelCost, simulated_steps
from bench.record import Figure, missing_figure
from mosaic.models import PAPER_MODELS
from mosaic.plan import Plan
from mosaic.profile import Phase

METHODS = ("auto", "spindle", "distmm", "megatron")
"""Those that the paper compares; ``auto`` is ours."""
PHASES = (Phase.FORWARD, Phase.BACKWARD)


def shares_at_work(plan: Plan, table: ModelTable, step_ms: float) -> tuple[float, ...]:
    """Returns for each device the share of its SM time that is at work, from 0 to 1."""
    cost = ModelCost(table)
    at_work = [0.0] * plan.num_devices
    for placed in (placed for stage in plan.stages for placed in stage.placements):
        least = sum(
            min(
                quota * cost.time_ms(placed.module, phase, placed.degree, quota) for quota in cost.quotas(placed.module)
            )
            for phase in PHASES
        )
        for device in placed.devices:
            at_work[device] += placed.part.share * least
    return tuple(work / (plan.device.num_slots * step_ms) for work in at_work)


def figure_4b(*, num_devices: int = 4, seconds: float) -> Iterator[Figure]:
    """CLIP on four GPUs: steps over the best plan's, and SM time at work."""
    of = f"clip, {num_devices} GPUs"
    steps = simulated_steps("clip", num_devices, seconds=seconds, methods=METHODS)
    best = steps["auto"]
    for method, found in steps.items():
        names = (f"Fig. 4b: {method}: step over auto's, {of}, ratio", f"Fig. 4b: {method}: SM time at work, {of}, %")
        if isinstance(found, str) or isinstance(best, str):
            yield from (missing_figure(name, found, source="simulated") for name in names)
            continue
        shares = shares_at_work(found[0], load_table("clip"), found[1])
        yield Figure(name=names[0], source="simulated", value=found[1] / best[1])
        yield Figure(name=names[1], source="simulated", value=100 * statistics.fmean(shares), samples=shares)


def figure_10(*, num_devices: int = 32, seconds: float, models: tuple[str, ...] = PAPER_MODELS) -> Iterator[Figure]:
    """SM time at work of each model under each planner, their mean, and OFASys's least used device."""
    means: dict[str, list[float]] = {method: [] for method in METHODS}
    for model in models:
        steps = simulated_steps(
            model, num_devices, seconds=seconds, methods=METHODS, with_memory=model not in TOO_LARGE
        )
        of = f"{model}, {num_devices} GPUs" + (" of any memory" if model in TOO_LARGE else "")
        for method, found in steps.items():
            name = f"Fig. 10: {method}: SM time at work, {of}"
            if isinstance(found, str):
                yield missing_figure(f"{name}, %", found, source="simulated")
                continue
            shares = shares_at_work(found[0], load_table(model), found[1])
            means[method].append(100 * statistics.fmean(shares))
            yield Figure(name=f"{name}, %", source="simulated", value=means[method][-1], samples=shares)
            if model == "ofasys":
                least = 100 * min(shares)
                yield Figure(name=f"{name}, least used GPU, %", source="simulated", value=least)
    yield from _of_all(means, models, num_devices)


def _of_all(means: Mapping[str, list[float]], models: tuple[str, ...], num_devices: int) -> Iterator[Figure]:
    count = "six" if models == PAPER_MODELS else str(len(models))
    for method, found in means.items():
        name = f"Fig. 10: {method}: SM time at work, mean of {count} models, {num_devices} GPUs, %"
        if len(found) == len(models):
            yield Figure(name=name, source="simulated", value=statistics.fmean(found), samples=tuple(found))
        else:
            yield missing_figure(name, f"{len(models) - len(found)} models have no plan", source="simulated")
