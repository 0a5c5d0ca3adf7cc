"""The table of a plan, and the picture of its predicted step.

In the picture a module's height is its share of the device, and its length is its predicted time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mosaic.graph import ModuleGraph
from mosaic.plan import Placement, Plan
from mosaic.profile import note_of_others
from mosaic.report.figure import SHADES, Bar, Panel, colors_of, lane_figure, lighter
from mosaic.report.table import make_table

if TYPE_CHECKING:
    from rich.table import Table

_MARGIN = 0.05
"""Free share of a device's height above and below its modules."""


def slot_runs(slots: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Groups adjacent slots as (first, count): ``(0, 1, 4)`` gives ``((0, 2), (4, 1))``."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(set(slots)):
        if runs and slot == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return tuple(runs)


def slots_text(slots: Sequence[int]) -> str:
    """Formats slots as ``0-1,4``, or ``none``."""
    return ",".join(f"{a}" if n == 1 else f"{a}-{a + n - 1}" for a, n in slot_runs(slots)) or "none"


def ms_text(time_ms: float) -> str:
    """Formats milliseconds with at least three digits and no exponent."""
    return f"{time_ms:.0f}" if time_ms >= 100 else f"{time_ms:.3g}"


def _device_text(plan: Plan) -> str:
    text = f"{plan.device.name}, {plan.device.num_slots} slots"
    return f"{plan.num_devices} × {text} each" if plan.num_devices > 1 else text


def plan_table(plan: Plan, graph: ModuleGraph | None = None) -> Table:
    """Returns a table of placements with predicted times by stage; ``graph`` adds predecessors."""
    has_communication = any(p.route_forward_ms or p.route_backward_ms or p.reduce_ms for p in plan.placements)
    columns = [">stage", "module", ">devices", ">slots", ">quota", ">forward\nms", ">backward\nms"]
    columns += [">route\nms", ">sum\nms"] if has_communication else []
    columns += ["waits for"] if graph else []
    rows, bold, ends = [], [], []
    for index, stage in enumerate(plan.stages):
        for row, placement in enumerate(stage.placements):
            cells = [
                str(index) if row == 0 else "",
                placement.module,
                slots_text(placement.devices),
                " / ".join(slots_text(slots) for slots in placement.slots_by_device or (placement.slots,)),
                f"{placement.quota}/{plan.device.num_slots} ({placement.quota / plan.device.num_slots:.0%})",
                f"{placement.forward_ms:.2f}",
                f"{placement.backward_ms:.2f}",
            ]
            if has_communication:
                routing_ms = placement.route_forward_ms + placement.route_backward_ms
                cells += [f"{routing_ms:.2f}", f"{placement.reduce_ms:.2f}"]
            rows.append([*cells, ", ".join(graph.predecessors(placement.module)) or "-"] if graph else cells)
        if len(stage.placements) > 1:
            bold.append(len(rows))
            rows.append(["", "slowest", "", "", "", f"{stage.forward_ms:.2f}", f"{stage.backward_ms:.2f}"])
        ends.append(len(rows) - 1)
    title = f"Plan, predicted: {_device_text(plan)}"
    return make_table(title, columns, rows, caption=_caption(plan, has_communication), bold=bold, ends=ends)


def _caption(plan: Plan, has_communication: bool) -> str:
    if plan.predicted_ms <= 0:
        return "this plan has no predicted times"
    lines = [f"predicted step: {plan.predicted_ms:.2f} ms for the modules"]
    if plan.sequential_ms > 0:
        one_at_a_time = f"one module at a time: {plan.sequential_ms:.2f} ms"
        lines.append(f"predicted {one_at_a_time}; speed-up: {plan.predicted_speedup:.2f}×")
    if has_communication:
        lines.append("route: rows sent between devices; sum: gradient reduction after a backward")
    lines.append(f"slot time in use: {plan.utilisation:.0%}, modelled from predicted times")
    if note := note_of_others(plan.foreign_cpu_share, plan.device):
        lines.append(f"while its modules were measured, {note}")
    return "\n".join(lines)


def plan_figure(plan: Plan) -> Any:
    """Returns the figure of a plan's predicted step: a lane per device, white if unused.

    Forwards are in stage order in the modules' colours, then backwards in reverse order in lighter shades. A stage is
    as long as its slowest module. Without predicted times each module has length 1.
    """
    note = note_of_others(plan.foreign_cpu_share, plan.device)
    colors = colors_of(placement.module for placement in plan.placements)
    is_predicted = plan.predicted_ms > 0
    return lane_figure(
        [_panel(plan, colors)],
        title=f"The plan on {_device_text(plan)}" + (" (predicted)" if is_predicted else ""),
        subtitle=f"while its modules were measured, {note}" if note else "",
        legend=colors | SHADES,
        axis="predicted milliseconds" if is_predicted else "no predicted times: all lengths are 1",
        lane_inches=1.15,
    )


def _panel(plan: Plan, colors: Mapping[str, str]) -> Panel:
    bars, spans, start = list[Bar](), list[tuple[float, float, tuple[str, ...]]](), 0.0
    stages = list(enumerate(plan.stages))
    for phase, ordered in (("forward", stages), ("backward", stages[::-1])):
        for index, stage in ordered:
            end = start
            for placement in stage.placements:
                predicted_ms = placement.forward_ms if phase == "forward" else placement.backward_ms
                if length := predicted_ms if plan.predicted_ms > 0 else 1.0:
                    end = max(end, start + length)
                    bars += _bars(plan, placement, phase, start, start + length, colors[placement.module])
            if end > start:
                spans.append((start, end, (f"stage {index} {phase}", f"{index} {phase}", f"{index}{phase[0].upper()}")))
            start = end
    kind = "cores" if plan.device.kind == "host" else "GPU"
    fact = "no predicted times; lengths are nominal"
    if plan.predicted_ms > 0:
        fact = f"{ms_text(plan.predicted_ms)} ms per step, {plan.utilisation:.0%} of slot time in use (modelled)"
        if plan.is_colocated and plan.sequential_ms > 0:
            fact += f", predicted speed-up {plan.predicted_speedup:.2f}×"
    return Panel(
        title=f"{'colocated' if plan.is_colocated else 'one module at a time'}: {fact}",
        lanes=[f"{kind} {device}" for device in range(plan.num_devices)],
        spans=spans,
        bars=bars,
    )


def _bars(plan: Plan, placement: Placement, phase: str, start_ms: float, end_ms: float, color: str) -> Iterator[Bar]:
    for device in placement.devices:
        for first, count in slot_runs(placement.slots_on(device)):
            yield Bar(
                start_ms=start_ms,
                end_ms=end_ms,
                low=device + _MARGIN + first / plan.device.num_slots * (1 - 2 * _MARGIN),
                height=count / plan.device.num_slots * (1 - 2 * _MARGIN),
                color=lighter(color) if phase == "backward" else color,
                edge=color,
                label=placement.module,
                gid=f"{placement.module}/{phase}/{device}",
            )
