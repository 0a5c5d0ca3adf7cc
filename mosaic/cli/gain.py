"""``mosaic plan --explain-gain``: the predicted gain of a plan, and the bound of each module in plain words."""

from __future__ import annotations

from collections.abc import Mapping
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

MEANING = {
    "launch-bound": "the host's thread is slower than the GPU: CUDA graphs help, more SMs do not",
    "SM-bound": "it slows down on fewer SMs, and gains from a neighbour only where it leaves SMs idle",
    "bandwidth-bound": "a part of the SMs uses up the memory's bandwidth; another module can compute on the rest",
}
RULE = (
    "rule of thumb: on the whole GPU a module is launch-bound, SM-bound or bandwidth-bound by the longest of three "
    "predicted times: kernels times the launch time, FLOPs over the reached peaks, bytes over the reached bandwidth"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGain:
    """The bound of one module, forward and backward together on a whole device, by predicted milliseconds."""

    name: str
    bound_by: str
    """Key of ``MEANING``."""
    whole_ms: float
    """Time alone on all slots."""
    launch_ms: float
    sm_ms: float
    bandwidth_ms: float


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
    launch_ms: float
    """Launches of all kernels on the fullest GPU, a lower bound of an eager step; 0 on the host."""
    utilisation_modelled: float
    """Share of slot time in use."""
    modules: tuple[ModuleGain, ...]


def explain(plan: Plan, cost: Cost, counts: Mapping[str, Mapping[int, ModuleCounts]], hardware: Hardware) -> Gain:
    """Explains a plan by the counts of its modules at each degree for a described device."""
    whole = {name: by_degree[min(by_degree)] for name, by_degree in counts.items()}
    modules = {name: _explain_module(name, cost, own, hardware) for name, own in whole.items()}
    launch_ms = [0.0] * plan.num_devices
    if hardware.kind == "cuda":
        for placement in plan.placements:
            for device in placement.devices:
                launch_ms[device] += modules[placement.module].launch_ms
    return Gain(
        device=plan.device.name,
        sequential_ms=plan.sequential_ms,
        expected_ms=max(plan.predicted_ms, *launch_ms),
        plan_ms=plan.predicted_ms,
        bound_ms=plan.search.bound_ms or None,
        launch_ms=max(launch_ms),
        utilisation_modelled=plan.utilisation,
        modules=tuple(modules.values()),
    )


def _explain_module(name: str, cost: Cost, counts: ModuleCounts, hardware: Hardware) -> ModuleGain:
    degree = cost.degrees(name)[0]
    whole_ms = sum(cost.time_ms(name, phase, degree, max(cost.quotas(name, degree))) for phase in Phase)
    launch_ms = (counts.forward.kernels + counts.backward.kernels) * hardware.launch_us / 1e3
    sm_ms, moved_bytes = 0.0, 0
    for operator in (*counts.forward.operators, *counts.backward.operators):
        peak = hardware.peak_tflops(operator.dtype, is_conv=operator.kind is OperatorKind.CONV)
        peak = hardware.fp32_tflops if operator.kind is OperatorKind.MEMORY else peak
        sm_ms += operator.calls * operator.flops / (peak * getattr(hardware.efficiency, operator.kind)) / 1e9
        moved_bytes += operator.calls * operator.moved_bytes
    bandwidth_ms = moved_bytes / (hardware.memory_gb_per_s * hardware.efficiency.memory) / 1e6
    times = {"launch_ms": launch_ms, "sm_ms": sm_ms, "bandwidth_ms": bandwidth_ms}
    bound = max(zip(times.values(), MEANING, strict=True))[1]
    return ModuleGain(name=name, bound_by=bound, whole_ms=whole_ms, **times)


def gain_table(gain: Gain) -> Table:
    """Returns a row for each module."""
    rows = [
        (m.name, *(f"{ms:.2f}" for ms in (m.whole_ms, m.launch_ms, m.sm_ms, m.bandwidth_ms)), m.bound_by)
        for m in gain.modules
    ]
    columns = ("module", ">alone\nms", ">launches\nms", ">SMs\nms", ">memory\nms", "bound")
    return make_table(f"Bounds on {gain.device}, predicted", columns, rows)


def gain_sentences(gain: Gain) -> list[str]:
    """Returns the expected step in plain words."""
    ratio = gain.sequential_ms / gain.expected_ms if gain.expected_ms else 1.0
    lines = [
        RULE,
        *(f"{bound}: {MEANING[bound]}" for bound in dict.fromkeys(module.bound_by for module in gain.modules)),
        f"expected step on {gain.device}, predicted, without loss and optimizer: one module at a time "
        f"{gain.sequential_ms:.2f} ms, with this plan {gain.expected_ms:.2f} ms ({ratio:.2f}×)",
    ]
    if gain.bound_ms:
        best = f"{gain.bound_ms:.2f} ms (at most {gain.sequential_ms / gain.bound_ms:.2f}×)"
        lines.append(f"bound, predicted: no plan of whole modules is under {best}")
    else:
        lines.append("no bound is known: --method auto or exact gives one for up to 16 modules")
    if gain.launch_ms:
        launches = f"one thread launches all kernels in {gain.launch_ms:.2f} ms, predicted"
        if gain.launch_ms > gain.plan_ms:
            eager = "an eager step takes at least that; with CUDA graphs the plan takes"
            lines.append(f"{launches}: {eager} {gain.plan_ms:.2f} ms")
        else:
            lines.append(f"{launches}: less than the plan's step, so launches do not bound it")
    return lines
