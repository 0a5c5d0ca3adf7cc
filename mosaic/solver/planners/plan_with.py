"""One face for all comparison planners: a name, a graph and a cost model in; a schedule of waves out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from mosaic.cost import Cost
from mosaic.device import Device
from mosaic.errors import InfeasibleError
from mosaic.graph import ModuleGraph
from mosaic.plan import SearchRecord
from mosaic.profile import Phase
from mosaic.solver.gahc.stage_eval import StageEvaluator
from mosaic.solver.memory.holding import keeps_anything
from mosaic.solver.memory.options import alone_within_memory
from mosaic.solver.options import DeploymentOption, QuotaGrid, all_options
from mosaic.solver.planners.coverage import check_schedule
from mosaic.solver.planners.distmm import balance, best_waves, waves_of_level
from mosaic.solver.planners.draft import DraftWave, Job, PlannerSettings, Widths, levels, whole_device_widths, whole_job
from mosaic.solver.planners.held_waves import within_memory
from mosaic.solver.planners.megatron import all_on_all
from mosaic.solver.planners.optimus import by_marginal_gain
from mosaic.solver.planners.placing import place_waves
from mosaic.solver.planners.spindle import sliced_waves
from mosaic.solver.planners.waves import Part, Run, Wave, WavePlan
from mosaic.solver.sequential import one_by_one
from mosaic.solver.stage import Machine, StageResult

PLANNERS = ("sequential", "megatron", "distmm", "distmm-waves", "spindle", "spindle-optimus")
"""Names of the comparison planners. Their order by predicted time differs from input to input."""


def plan_with(
    name: str,
    graph: ModuleGraph,
    cost: Cost,
    device: Device,
    *,
    num_devices: int = 1,
    grid: QuotaGrid | None = None,
    settings: PlannerSettings | None = None,
) -> WavePlan:
    """Plans with one of the schemes that Mosaic is compared with, under the same cost model.

    None of them shares a device, so there is no interference in their times. A part's time is its share of the
    module's time at that degree and quota, plus ``settings.slice_overhead_ms`` where it is a slice, in forward and
    backward each. A wave takes as long as its slowest forward and its slowest backward, as a plan's stage does.
    No device is given more than it has over the whole step (``held_waves``), as in every other plan: runs get other
    devices where theirs do not hold them, and ``sequential`` other degrees.

    Args:
        name: One of ``PLANNERS``.
        graph: What to place.
        cost: Times and memory.
        device: What one of the devices is.
        num_devices: How many of them.
        grid: Quotas that ``sequential`` may use; the other planners take the whole device.
        settings: Granularity of slices, and variants.

    Raises:
        InfeasibleError: A module fits on no device (names it, what it needs and what there is), or devices do not
            hold what the planner chose.
        UndecidedError: No plan was found that devices hold, and it is not proven that there is none.
        ValueError: There are no devices, no such planner, a count of operators for a module that is not there, or the
            cost model gives a negative time.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}; a plan needs at least one device")
    if name not in PLANNERS:
        raise ValueError(f"name={name!r} is not a comparison planner; use one of {', '.join(PLANNERS)}")
    began = time.perf_counter()
    settings = settings or PlannerSettings()
    if unknown := sorted(set(settings.num_operators) - set(graph.names)):
        raise ValueError(f"num_operators names {unknown}; the modules are {', '.join(graph.names)}")
    options = all_options(graph, cost=cost, device=device, num_devices=num_devices, grid=grid)
    machine = Machine(num_devices=num_devices, num_slots=device.num_slots, memory_bytes=device.memory_bytes)
    is_held = settings.hold_memory and keeps_anything(options, machine)
    in_turn = waves = _in_turn(graph, options, cost, machine, settings, is_held=is_held)
    if name != "sequential":
        widths = {module: whole_device_widths(found) for module, found in options.items()}
        waves = _timed(_draft(name, graph, widths, num_devices, settings), graph, cost, num_devices, settings)
        if is_held:
            waves = within_memory(name, waves, options, machine)
    schedule = WavePlan(
        device=device,
        num_devices=num_devices,
        waves=waves,
        graph=graph.fingerprint,
        profile=cost.profile_fingerprint,
        sequential_ms=sum(wave.forward_ms + wave.backward_ms for wave in in_turn),
        search=SearchRecord(method=name, seconds=time.perf_counter() - began),
    )
    check_schedule(schedule, graph)
    return schedule


def _in_turn(
    graph: ModuleGraph,
    options: Mapping[str, Sequence[DeploymentOption]],
    cost: Cost,
    machine: Machine,
    settings: PlannerSettings,
    *,
    is_held: bool,
) -> tuple[Wave, ...]:
    """Every module in turn at its own best; at degrees that devices hold where those are too much."""

    def waves_of(found: Sequence[StageResult]) -> tuple[Wave, ...]:
        drafts = [(whole_job(module, option),) for stage in found for module, (option, _) in stage.choices.items()]
        return _timed(drafts, graph, cost, machine.num_devices, settings)

    fastest = waves_of(one_by_one(graph, StageEvaluator(options, cost=cost, machine=machine)))
    if not is_held:
        return fastest
    try:
        return within_memory("sequential", fastest, options, machine)
    except InfeasibleError:
        held = alone_within_memory(graph, options, machine)
    homes = [devices for stage in held for _, devices in stage.choices.values()]
    return tuple(
        replace(wave, runs=(replace(wave.runs[0], devices=devices),))
        for wave, devices in zip(waves_of(held), homes, strict=True)
    )


def _draft(
    name: str, graph: ModuleGraph, widths: Mapping[str, Widths], num_devices: int, settings: PlannerSettings
) -> list[DraftWave]:
    order = graph.topological_order()
    if name == "megatron":
        return all_on_all(order, widths)
    if name == "spindle":
        return sliced_waves(graph, widths, num_devices, settings)
    share = by_marginal_gain if name == "spindle-optimus" else balance
    balance_wave = partial(share, widths=widths, num_devices=num_devices)
    waves: list[DraftWave] = []
    for level in levels(order, graph.predecessors):
        search = name == "distmm-waves" and len(level) <= settings.max_partitioned
        waves += (best_waves if search else waves_of_level)(level, widths, num_devices, balance_wave)
    return waves


def _timed(
    draft: Sequence[DraftWave], graph: ModuleGraph, cost: Cost, num_devices: int, settings: PlannerSettings
) -> tuple[Wave, ...]:
    """Gives every job its devices and every part its times."""
    placed = place_waves(draft, graph.predecessors, num_devices=num_devices, island_size=settings.island_size)
    return tuple(
        Wave(runs=tuple(_run(job, devices, cost, settings) for job, devices in zip(jobs, homes, strict=True)))
        for jobs, homes in zip(draft, placed, strict=True)
    )


def _run(job: Job, devices: tuple[int, ...], cost: Cost, settings: PlannerSettings) -> Run:
    degree, quota = job.option.degree, job.option.quota
    parts = []
    for part in job.parts:
        extra_ms = 0.0 if part.is_whole else settings.slice_overhead_ms
        forward_ms, backward_ms = (
            part.share * cost.placed_ms(part.module, phase, degree, quota) + extra_ms for phase in Phase
        )
        parts.append(
            Part(
                module=part.module,
                first=part.first,
                count=part.count,
                total=part.total,
                forward_ms=forward_ms,
                backward_ms=backward_ms,
            )
        )
    return Run(parts=tuple(parts), devices=devices, quota=quota)
