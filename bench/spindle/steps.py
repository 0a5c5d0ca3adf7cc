"""Every planner's plan of a workload, its step, and what is told from it: ratios, arithmetic, memory.

A step is simulated, alike for all: a part starts when its inputs are there and its slots are free, and gradients are
summed while the backward goes on, as Megatron-LM and DeepSpeed do it too, on a network that all modules of a device
share. What a planner predicts of its own plan has barriers between stages, and a network for each module alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from bench.papers.planners import task_planners
from bench.record import Figure, missing_figure, one_line
from bench.spindle.workload import Workload
from mosaic.cost.communication import RankedCost
from mosaic.device import Device
from mosaic.hardware import Cluster
from mosaic.plan import Placement, Plan
from mosaic.profile import Phase
from mosaic.simulate.step import simulate
from mosaic.solver import SearchOptions
from mosaic.solver.compare import Comparison, compare
from mosaic.solver.limits import SearchLimits
from mosaic.solver.methods import METHODS as PRODUCT_METHODS
from mosaic.solver.options import NS_PER_MS, all_options
from mosaic.solver.planners.spindle import continuous_optimum, contract
from mosaic.solver.planners.waves import whole_device_widths
from mosaic.solver.predict import with_communication
from mosaic.solver.runnable import plan_to_run

METHODS = ("megatron", "distmm-mt", "distmm", "spindle-optimus", "spindle-seq", "spindle", "exact", "auto")
"""Spindle's paper has no ``distmm`` over all tasks. ``exact`` and ``auto`` are Mosaic: its search, and its default."""
BASE = "megatron"
"""With which others are compared, as DeepSpeed in the paper, which runs task after task on all devices, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep(Comparison):
    """A method's plan with its step."""

    step_ms: float | None = None
    """Simulated, in milliseconds; None where there is no plan."""


def steps_of(
    workload: Workload,
    num_devices: int,
    seconds: float,
    *,
    methods: Sequence[str] = METHODS,
) -> dict[str, PlannedStep]:
    """Returns what each method plans; memory limits nobody (see ``Workload.on``).

    Args:
        workload: What is trained.
        num_devices: GPUs.
        seconds: When a search ends.
        methods: Who plans.
    """
    cost, device, _ = workload.on(num_devices)
    search = SearchOptions(limits=SearchLimits(effort=seconds), hold_memory=False, planners=workload.settings)
    known = PRODUCT_METHODS | {method.name: method for method in task_planners(workload.task_names)}
    compared = tuple(known[method] for method in methods if method != "auto")
    found = compare(workload.graph, cost, device, num_devices=num_devices, methods=compared, search=search)
    if "auto" in methods:
        found = (*found, _default(workload, cost, device, num_devices, search))
    made = {}
    for one in found:
        told = {field.name: getattr(one, field.name) for field in fields(one)}
        if one.plan is not None:
            told["plan"] = plan = with_communication(one.plan, cost)
            told["step_ms"] = simulate(plan, workload.graph, sums=cost.summed).makespan_ms
        made[one.method] = PlannedStep(**told)
    return made


def _default(
    workload: Workload, cost: RankedCost, device: Device, num_devices: int, search: SearchOptions
) -> Comparison:
    """What runs where nobody names a method."""
    began = time.perf_counter()
    plan = plan_to_run("auto", workload.graph, cost, device, num_devices=num_devices, search=search)
    seconds = time.perf_counter() - began
    return Comparison(
        method="auto", plan=plan, predicted_ms=plan.predicted_ms, status=plan.search.status, seconds=seconds
    )


def ratio_figure(
    name: str,
    over: PlannedStep,
    under: PlannedStep,
    *,
    paper: str = "",
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """Returns the quotient of two steps; without a number where there is none of them."""
    told = dict(labels or {}) | ({"paper": paper} if paper else {})
    if over.step_ms is None or under.step_ms is None:
        return missing_figure(name, one_line(over.reason or under.reason), told, source="simulated")
    told["status"] = under.status
    return Figure(name=name, source="simulated", value=over.step_ms / under.step_ms, labels=told)


def theoretical_ms(workload: Workload, num_devices: int) -> float:
    """Returns Spindle's C*, the sum of its levels' continuous optima, in milliseconds."""
    cost, device, _ = workload.on(num_devices)
    options = all_options(workload.graph, cost=cost, device=device, num_devices=num_devices)
    widths = {name: whole_device_widths(own) for name, own in options.items()}
    levels = contract(workload.graph, widths, workload.settings)
    ends_ns = [continuous_optimum([chain.metaop() for chain in level], num_devices)[0] for level in levels]
    return sum(ends_ns) / NS_PER_MS


def share_of_peak(step_ms: float, workload: Workload, cluster: Cluster, num_devices: int) -> float:
    """Returns the operations of a step over what the devices' matrix units could do in its time."""
    flops = sum(own[1].phase(phase).flops for own in workload.counts.values() for phase in Phase)
    return flops / (step_ms * 1e9 * cluster.hardware.bf16_tflops * num_devices)


def share_of_sums(found: Comparison) -> float:
    """Returns the share of a step in which gradients' sums are waited for, those behind a backward left out."""
    assert found.plan is not None
    without_ms = sum(
        stage.forward_ms + max(placed.backward_ms - placed.reduce_ms for placed in stage.placements)
        for stage in found.plan.stages
    )
    return 1 - without_ms / found.plan.predicted_ms


def held_gb(plan: Plan, workload: Workload) -> list[float]:
    """Returns what each device keeps, in 10^9 bytes: each layer's parameters once, and activations of all its tasks."""
    parameters: list[set[tuple[str, int, int]]] = [set() for _ in range(plan.num_devices)]
    activations = [0.0] * plan.num_devices
    resident: dict[str, float] = defaultdict(float)
    for name, own in workload.counts.items():  # of each of the modules that share them an equal part
        resident[workload.parameters[name]] += next(iter(own.values())).memory.resident_bytes
    for placed in plan.placements:
        shared = workload.parameters[placed.module]
        layers = {(shared, at, placed.part.total) for at in range(placed.part.first, placed.part.end)}
        for device in placed.devices:
            parameters[device] |= layers
            activations[device] += placed.part.share * _activation_bytes(workload, placed)
    return [
        (sum(resident[name] / total for name, _, total in own) + kept) / 1e9
        for own, kept in zip(parameters, activations, strict=True)
    ]


def _activation_bytes(workload: Workload, placed: Placement) -> float:
    by_degree = workload.counts[placed.module]
    counted = max(degree for degree in by_degree if degree <= placed.degree)
    return by_degree[counted].memory.activation_bytes * counted / placed.degree
