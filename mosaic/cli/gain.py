"""``mosaic plan --explain-gain``: the predicted gain of a plan, and the bound of each module in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mosaic.cost.counts import OperatorKind
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.report.table import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from mosaic.cost import Cost
    from mosaic.cost.counts import ModuleCounts
    from mosaic.hardware import Hardware

    CountsByDegree = Mapping[str, Mapping[int, ModuleCounts]]

SCALES = 1.25
"""Least speed-up from half of the slots to all of them of a module that is SM-bound by its times."""
MEANING = {
    "launch-bound": "the host's thread is slower than the GPU: CUDA graphs help, more SMs do not",
    "SM-bound": "it slows down on fewer SMs, and gains from a neighbour only where it leaves SMs idle",
    "bandwidth-bound": "a part of the SMs uses up the memory's bandwidth; another module can compute on the rest",
    "not SM-bound": "half of the slots are nearly as fast: a neighbour can have the others",
    "unknown": "its time is known at one quota only",
}
RULE = (
    "rule of thumb: on the whole GPU a module is launch-bound, SM-bound or bandwidth-bound by the longest of three "
    "predicted times: kernels times the launch time, FLOPs over the reached peaks, bytes over the reached bandwidth"
)
TIMES_ONLY = (
    "only times are known, no counts: a module is called SM-bound if all slots are at least "
    f"{SCALES:.2f} times as fast as half of them; --model FILE:FACTORY with --device counts operators"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGain:
    """The bound of one module, forward and backward together on a whole device, by predicted milliseconds."""

    name: str
    bound_by: str
    """Key of ``MEANING``."""
    whole_ms: float
    """Time alone on all slots that its times are known for."""
    launch_ms: float | None = None
    """Launches of its kernels by one thread of the host; None without counts."""
    sm_ms: float | None = None
    """Its FLOPs on all SMs."""
    bandwidth_ms: float | None = None
    """Its bytes at the memory's bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The predicted gain of a plan; nothing in it was measured."""

    source: str = "predicted"
    device: str
    sequential_ms: float
    """A step one module at a time."""
    expected_ms: float
    """A step with the plan as the loop launches it: not below ``launch_ms``."""
    plan_ms: float
    """A step with the plan if each module had a launching thread of its own."""
    bound_ms: float | None
    """No plan of whole modules is predicted faster; None without a bound."""
    launch_ms: float | None
    """Launches of all kernels on the fullest device, a lower bound of an eager step; None without counts of a GPU."""
    utilisation_modelled: float
    """Share of slot time in use."""
    modules: tuple[ModuleGain, ...]


def explain(plan: Plan, names: Sequence[str], cost: Cost, counts: CountsByDegree, hardware: Hardware | None) -> Gain:
    """Explains a plan of the modules ``names`` by their times, and by counts for a described device if any."""
    launch_ms, counted = None, {name: by_degree[min(by_degree)] for name, by_degree in counts.items()}
    if hardware is not None and hardware.kind == "cuda":
        by_device = [0.0] * plan.num_devices
        for placement in plan.placements:
            for device in placement.devices:
                by_device[device] += _launch_ms(counted[placement.module], hardware)
        launch_ms = max(by_device)
    return Gain(
        device=plan.device.name,
        sequential_ms=plan.sequential_ms,
        expected_ms=max(plan.predicted_ms, launch_ms or 0.0),
        plan_ms=plan.predicted_ms,
        bound_ms=plan.search.bound_ms or None,
        launch_ms=launch_ms,
        utilisation_modelled=plan.utilisation,
        modules=tuple(_module(name, cost, counted.get(name), hardware) for name in names),
    )


def _module(name: str, cost: Cost, counts: ModuleCounts | None, hardware: Hardware | None) -> ModuleGain:
    degree = cost.degrees(name)[0]
    at = {q: sum(cost.time_ms(name, phase, degree, q) for phase in Phase) for q in cost.quotas(name, degree)}
    whole_ms = at[max(at)]
    if counts is None or hardware is None:
        half = max((quota for quota in at if 2 * quota <= max(at)), default=None)
        bound = "unknown" if half is None else "SM-bound" if at[half] >= SCALES * whole_ms else "not SM-bound"
        return ModuleGain(name=name, bound_by=bound, whole_ms=whole_ms)
    times = _launch_ms(counts, hardware), *_work_ms(counts, hardware)
    bound = max(zip(times, ("launch-bound", "SM-bound", "bandwidth-bound"), strict=True))[1]
    launch_ms, sm_ms, bandwidth_ms = times
    own = {"launch_ms": launch_ms, "sm_ms": sm_ms, "bandwidth_ms": bandwidth_ms}
    return ModuleGain(name=name, bound_by=bound, whole_ms=whole_ms, **own)


def _launch_ms(counts: ModuleCounts, hardware: Hardware) -> float:
    return (counts.forward.kernels + counts.backward.kernels) * hardware.launch_us / 1e3


def _work_ms(counts: ModuleCounts, hardware: Hardware) -> tuple[float, float]:
    """Returns the time of all FLOPs at the peaks that are reached, and of all bytes at the reached bandwidth."""
    sm_ms, moved_bytes = 0.0, 0
    for operator in (*counts.forward.operators, *counts.backward.operators):
        peak = hardware.peak_tflops(operator.dtype, is_conv=operator.kind is OperatorKind.CONV)
        peak = hardware.fp32_tflops if operator.kind is OperatorKind.MEMORY else peak
        sm_ms += operator.calls * operator.flops / (peak * getattr(hardware.efficiency, operator.kind)) / 1e9
        moved_bytes += operator.calls * operator.moved_bytes
    return sm_ms, moved_bytes / (hardware.memory_gb_per_s * hardware.efficiency.memory) / 1e6


def gain_table(gain: Gain) -> Table:
    """Returns a row for each module."""
    rows = []
    for module in gain.modules:
        times = (module.whole_ms, module.launch_ms, module.sm_ms, module.bandwidth_ms)
        cells = ("-" if time_ms is None else f"{time_ms:.2f}" for time_ms in times)
        rows.append((module.name, *cells, module.bound_by))
    columns = ("module", ">alone\nms", ">launches\nms", ">SMs\nms", ">memory\nms", "bound")
    return make_table(f"Bounds on {gain.device}, predicted", columns, rows)


def gain_sentences(gain: Gain) -> list[str]:
    """Returns the expected step in plain words."""
    has_times_only = all(module.launch_ms is None for module in gain.modules)
    bounds = dict.fromkeys(module.bound_by for module in gain.modules)
    ratio = gain.sequential_ms / gain.expected_ms if gain.expected_ms else 1.0
    lines = [
        TIMES_ONLY if has_times_only else RULE,
        *(f"{bound}: {MEANING[bound]}" for bound in bounds),
        f"expected step on {gain.device}, predicted, without loss and optimizer: one module at a time "
        f"{gain.sequential_ms:.2f} ms, with this plan {gain.expected_ms:.2f} ms ({ratio:.2f}×)",
    ]
    if gain.bound_ms:
        best = gain.sequential_ms / gain.bound_ms
        lines.append(
            f"bound, predicted: no plan of whole modules is under {gain.bound_ms:.2f} ms (at most {best:.2f}×)"
        )
    else:
        lines.append("no bound is known: --method auto or exact gives one for up to 16 modules")
    if gain.launch_ms is not None:
        floor = f"one thread launches all kernels in {gain.launch_ms:.2f} ms, predicted"
        if gain.launch_ms > gain.plan_ms:
            lines.append(
                f"{floor}: an eager step takes at least that; with CUDA graphs the plan takes {gain.plan_ms:.2f} ms"
            )
        else:
            lines.append(f"{floor}: less than the plan's step, so launches do not bound it")
    if has_times_only:
        lines.append(f"the times are those of {gain.device}; for a described GPU give --model and --device")
    return lines
