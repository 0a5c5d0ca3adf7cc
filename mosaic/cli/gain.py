"""``mosaic plan --explain-gain``: the predicted gain of a plan and the bound of each module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mosaic.cost.roofline import operator_ms
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.report.table import make_table

if TYPE_CHECKING:
    from rich.console import Console

    from mosaic.cost import Cost
    from mosaic.cost.counts import ModuleCounts
    from mosaic.hardware import Hardware

MEANING = {
    "launch-bound": "the launching thread is slower than the GPU; CUDA graphs help, more SMs do not",
    "SM-bound": "it is slower on fewer SMs; a neighbour helps only if SMs are idle",
    "bandwidth-bound": "some of the SMs saturate the memory bandwidth; another module can compute on the others",
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
    """The step with one module at a time."""
    expected_ms: float
    """The step with the plan, at least ``launch_ms``."""
    plan_ms: float
    """The step with the plan, without the launch bound."""
    bound_ms: float | None
    """Lower bound of all plans of whole modules; None without a bound."""
    launch_ms: float
    """Time to launch all kernels of the busiest GPU, a lower bound of an eager step; 0 on the host."""
    modules: tuple[ModuleGain, ...]

    def print(self, console: Console) -> None:
        """Prints a row for each module, and the expected step."""
        rows = [
            (m.name, *(f"{ms:.2f}" for ms in (m.whole_ms, m.launch_ms, m.sm_ms, m.bandwidth_ms)), m.bound_by)
            for m in self.modules
        ]
        columns = ("module", ">alone\nms", ">launches\nms", ">SMs\nms", ">memory\nms", "bound")
        console.print(make_table(f"Bounds on {self.device}, predicted", columns, rows))
        ratio = self.sequential_ms / self.expected_ms if self.expected_ms else 1.0
        lines = [RULE, *(f"{bound}: {MEANING[bound]}" for bound in dict.fromkeys(m.bound_by for m in self.modules))]
        lines.append(
            f"expected step on {self.device}, predicted, without loss and optimizer: one module at a time "
            f"{self.sequential_ms:.2f} ms, with this plan {self.expected_ms:.2f} ms ({ratio:.2f}×)"
        )
        if self.bound_ms:
            best = f"{self.bound_ms:.2f} ms (at most {self.sequential_ms / self.bound_ms:.2f}×)"
            lines.append(f"bound, predicted: no plan of whole modules is under {best}")
        if self.launch_ms:
            note = "the plan's step is longer, so launches do not bound it"
            if self.launch_ms > self.plan_ms:
                note = f"an eager step takes at least this time; with CUDA graphs the plan takes {self.plan_ms:.2f} ms"
            lines.append(f"one thread launches all kernels in {self.launch_ms:.2f} ms, predicted: {note}")
        console.print(*lines, sep="\n", highlight=False, markup=False)


def explain(plan: Plan, cost: Cost, counts: Mapping[str, Mapping[int, ModuleCounts]], hardware: Hardware) -> Gain:
    """Explains a plan by the counts of its modules at each degree for a described device."""
    whole_batch = {name: by_degree[min(by_degree)] for name, by_degree in counts.items()}
    modules = {name: _explain_module(name, cost, own, hardware) for name, own in whole_batch.items()}
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
        modules=tuple(modules.values()),
    )


def _explain_module(name: str, cost: Cost, counts: ModuleCounts, hardware: Hardware) -> ModuleGain:
    degree = cost.degrees(name)[0]
    operators = (*counts.forward.operators, *counts.backward.operators)

    def bound_ms(**without: Any) -> float:
        lean = (replace(operator, kernels=0, **without) for operator in operators)
        return sum(operator.calls * operator_ms(operator, hardware, hardware.num_sms) for operator in lean)

    times = {
        "launch_ms": (counts.forward.kernels + counts.backward.kernels) * hardware.launch_us / 1e3,
        "sm_ms": bound_ms(read_bytes=0, written_bytes=0),
        "bandwidth_ms": bound_ms(flops=0),
    }
    whole_ms = sum(cost.time_ms(name, phase, degree, max(cost.quotas(name, degree))) for phase in Phase)
    return ModuleGain(name=name, bound_by=max(zip(times.values(), MEANING, strict=True))[1], whole_ms=whole_ms, **times)
