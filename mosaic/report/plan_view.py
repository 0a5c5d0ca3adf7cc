"""A plan for people: its table, and its predicted step as bars in the terminal and as a picture.

In the picture a module is as tall as its share of the device and as long as its predicted time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import note_of_others
from mosaic.report.figure import (
    FAINT,
    GRID,
    OUTSIDE,
    SHADES,
    WIDTH,
    add_bar,
    colors_of,
    fitting,
    ink_on,
    lighter,
    new_figure,
    save_figure,
    set_head,
)
from mosaic.report.table import add_row, new_table

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_GAP = 0.12
"""Empty height between the lanes of two devices, each 1.0 high."""


def slot_runs(slots: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Joins neighbouring slots: ``(0, 1, 4)`` gives ``((0, 2), (4, 1))``, each the first slot and how many."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(set(slots)):
        if runs and slot == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return tuple(runs)


def slots_text(slots: Sequence[int]) -> str:
    """Returns slots for people: ``0-1,4``; ``none`` if there are none."""
    return ",".join(f"{a}" if n == 1 else f"{a}-{a + n - 1}" for a, n in slot_runs(slots)) or "none"


def ms_text(time_ms: float) -> str:
    """Returns milliseconds with at least three digits and no exponent."""
    return f"{time_ms:.0f}" if time_ms >= 100 else f"{time_ms:.3g}"


def _device_text(plan: Plan) -> str:
    text = f"{plan.device.name}, {plan.device.num_slots} slots"
    return f"{plan.num_devices} × {text} each" if plan.num_devices > 1 else text


def plan_table(plan: Plan, graph: ModuleGraph | None = None) -> Table:
    """Returns a table of a plan's placements with predicted times, stage by stage.

    Args:
        plan: The plan.
        graph: Adds each module's predecessors.
    """
    has_communication = plan.communication_ms > 0
    numbers = ["devices", "slots", "quota", "forward\nms", "backward\nms"]
    numbers += ["route\nms", "sum\nms"] if has_communication else []
    columns = [("stage", True), ("module", False), *((heading, True) for heading in numbers)]
    columns += [("waits for", False)] if graph else []
    table = new_table(f"Plan, predicted: {_device_text(plan)}", columns, _caption(plan))
    for index, stage in enumerate(plan.stages):
        for row, placement in enumerate(stage.placements):
            cells = [
                str(index) if row == 0 else "",
                placement.module,
                slots_text(placement.devices),
                " / ".join(slots_text(slots) for slots in placement.slots_by_device or (placement.slots,)),
                f"{placement.quota}/{plan.device.num_slots} ({plan.device.fraction(placement.quota):.0%})",
                f"{placement.forward_ms:.2f}",
                f"{placement.backward_ms:.2f}",
            ]
            if has_communication:
                routing_ms = placement.route_forward_ms + placement.route_backward_ms
                cells += [f"{routing_ms:.2f}", f"{placement.reduce_ms:.2f}"]
            cells += [", ".join(graph.predecessors(placement.module)) or "-"] if graph else []
            add_row(table, cells, end_section=len(stage.placements) == 1)
        if len(stage.placements) > 1:
            slowest = ["", "slowest", "", "", "", f"{stage.forward_ms:.2f}", f"{stage.backward_ms:.2f}"]
            add_row(table, slowest, style="bold", end_section=True)
    return table


def _caption(plan: Plan) -> str:
    if plan.predicted_ms <= 0:
        return "no times are predicted in this plan"
    lines = [f"predicted step: {plan.predicted_ms:.2f} ms for the modules"]
    if plan.communication_ms > 0:
        lines.append(f"of all modules' times {plan.communication_ms:.2f} ms are communication:")
        lines.append("route: rows that travel between devices; sum: gradients summed after a backward")
    if plan.communication_sms:
        lines.append(f"{plan.communication_sms} SMs of each device are left to communication")
    if plan.sequential_ms > 0:
        lines.append(f"predicted one module at a time: {plan.sequential_ms:.2f} ms")
        lines.append(f"predicted speed-up: {plan.predicted_speedup:.2f}×")
    lines.append(f"found by {plan.search.method} in {plan.search.seconds:.2f} s")
    if note := note_of_others(plan.foreign_cpu_share, plan.device):
        lines.append(f"while its modules were measured, {note}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """One module's predicted forward or backward on one device."""

    module: str
    phase: Literal["forward", "backward"]
    device: int
    slots: tuple[int, ...]
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class _Layout:
    """A plan's step: forwards in stage order, then backwards in the reverse order, each stage as its slowest module."""

    bars: tuple[_Bar, ...]
    edges_ms: tuple[tuple[int, str, float, float], ...]
    """Stage index, phase, start and end of each stage's forward and backward."""
    total_ms: float
    is_nominal: bool
    """True if the plan predicts no times, so every forward and backward has length 1."""


def _layout(plan: Plan) -> _Layout:
    nominal = plan.predicted_ms <= 0
    bars: list[_Bar] = []
    edges: list[tuple[int, str, float, float]] = []
    now = 0.0
    stages = tuple(enumerate(plan.stages))
    phases: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    for phase in phases:
        for index, stage in stages if phase == "forward" else reversed(stages):
            longest = 0.0
            for placement in stage.placements:
                predicted_ms = placement.forward_ms if phase == "forward" else placement.backward_ms
                length = 1.0 if nominal else predicted_ms
                longest = max(longest, length)
                for device in placement.devices if length > 0 else ():
                    slots = placement.slots_on(device)
                    bars.append(
                        _Bar(
                            module=placement.module,
                            phase=phase,
                            device=device,
                            slots=slots,
                            start_ms=now,
                            end_ms=now + length,
                        )
                    )
            edges.append((index, phase, now, now + longest))
            now += longest
    return _Layout(tuple(bars), tuple(edges), now, nominal)


def plan_bars(plan: Plan, width: int) -> Text:
    """Returns a plan's predicted step as bars: a row per slot, a column per piece of time.

    Bars are ``image━━━│`` in forward and ``image╌╌╌│`` in backward, which differ without colour; blank is
    idle. Above 16 rows, neighbouring slots that do the same share one.

    Args:
        plan: What to show.
        width: Columns to fill, at least 40.
    """
    from rich.text import Text

    layout = _layout(plan)
    colors = colors_of(placement.module for placement in plan.placements)
    rows = _rows_of_slots(plan, layout.bars)
    margin = max((len(name) for name, _ in rows), default=0) + 1
    columns = max(width, 40) - margin - 1
    scale = columns / (layout.total_ms or 1.0)
    text = Text(no_wrap=True, overflow="crop")
    for name, bars in rows:
        text.append(f"{name:>{margin - 1}} ")
        at = 0
        for bar in bars:
            start, end = round(bar.start_ms * scale), round(bar.end_ms * scale)
            text.append(" " * (start - at))
            fill = "━" if bar.phase == "forward" else "╌"
            color = colors[bar.module] if bar.phase == "forward" else lighter(colors[bar.module])
            shown = bar.module[: max(1, end - start - 1)].ljust(end - start - 1, fill) + "│"
            text.append(shown[: end - start], style=f"{ink_on(color)} on {color}")
            at = max(at, end)
        text.append(" " * (columns - at) + "\n")
    end_of_axis = "no times predicted" if layout.is_nominal else f"{ms_text(layout.total_ms)} ms predicted"
    text.append(" " * margin + "0" + f"{end_of_axis:>{columns}}")
    return text


def _rows_of_slots(plan: Plan, bars: Sequence[_Bar]) -> list[tuple[str, tuple[_Bar, ...]]]:
    """Returns a name and the bars of each slot.

    Devices that do the same share their rows; above 16 slots, so do neighbouring slots of a device.
    """
    merge = plan.num_devices * plan.device.num_slots > 16
    devices_of: dict[tuple[tuple[tuple[int, ...], tuple[_Bar, ...]], ...], list[int]] = {}
    for device in range(plan.num_devices):
        device_bars = [replace(bar, device=0) for bar in bars if bar.device == device]
        rows: list[tuple[list[int], tuple[_Bar, ...]]] = []
        for slot in plan.device.slots:
            slot_bars = tuple(bar for bar in device_bars if slot in bar.slots)
            if merge and rows and rows[-1][1] == slot_bars:
                rows[-1][0].append(slot)
            else:
                rows.append(([slot], slot_bars))
        devices_of.setdefault(tuple((tuple(slots), slot_bars) for slots, slot_bars in rows), []).append(device)

    def numbered(noun: str, numbers: Sequence[int]) -> str:
        return f"{noun}{'s' if len(numbers) > 1 else ''} {slots_text(numbers)}"

    return [
        (f"{numbered('device', devices) + ' ' if plan.num_devices > 1 else ''}{numbered('slot', slots)}", slot_bars)
        for same, devices in devices_of.items()
        for slots, slot_bars in same
    ]


def draw_plan(plan: Plan, path: Path, *, sequential: Plan | None = None, subtitle: str = "") -> None:
    """Draws a plan's predicted step: one lane of height 1.0 per device, white for unused parts.

    Forwards run in stage order in the modules' colours, then backwards in the reverse order in lighter shades.

    Args:
        plan: The plan.
        path: A ``.png`` or ``.svg`` file; written whole or not at all.
        sequential: A plan of the same modules to draw above it on the same time axis.
        subtitle: Written under the title.

    Raises:
        MosaicError: matplotlib is missing, or the file cannot be written.
        ValueError: The suffix is neither ``.png`` nor ``.svg``.
    """
    save_figure(plan_figure(plan, sequential=sequential, subtitle=subtitle), path)


def plan_figure(plan: Plan, *, sequential: Plan | None = None, subtitle: str = "") -> Any:
    """Returns the figure of ``draw_plan``, with axes per plan."""
    if note := note_of_others(plan.foreign_cpu_share, plan.device):
        subtitle = "; ".join(filter(None, [subtitle, f"while its modules were measured, {note}"]))
    plans = [plan] if sequential is None else [sequential, plan]
    colors = colors_of([p.module for p in (*plan.placements, *plans[0].placements)])
    layouts = [_layout(shown) for shown in plans]
    figure = new_figure(
        [max(1.0, min(1.15 * shown.num_devices, 4.5)) for shown in plans],
        title=f"The plan on {_device_text(plan)}" + ("" if layouts[-1].is_nominal else " (predicted)"),
        subtitle=subtitle,
        legend=colors | SHADES,
    )
    end_ms = max(layout.total_ms for layout in layouts) or 1.0
    for axes, shown, layout in zip(figure.axes, plans, layouts, strict=True):
        lanes = shown.num_devices
        axes.set(xlim=(0, end_ms * 1.01), ylim=(lanes * (1 + _GAP) - _GAP, 0), facecolor=OUTSIDE)
        kind, every = "cores" if shown.device.kind == "host" else "GPU", max(1, -(-lanes // 12))
        names = ["all cores"] if kind == "cores" and lanes == 1 else [f"{kind} {device}" for device in range(lanes)]
        axes.set_yticks([device * (1 + _GAP) + 0.5 for device in range(0, lanes, every)], names[::every])
        set_head(axes, "colocated" if shown.is_colocated else "one module at a time", _fact(shown, layout), pad=18)
        is_last = axes is figure.axes[-1]
        axes.tick_params(axis="x", labelbottom=is_last and not layout.is_nominal, bottom=not layout.is_nominal)
        _draw(axes, shown, layout, colors)
    if not layouts[-1].is_nominal:
        figure.axes[-1].set_xlabel("predicted milliseconds")
    return figure


def _fact(plan: Plan, layout: _Layout) -> str:
    if layout.is_nominal:
        return "no times are predicted; lengths are nominal"
    used = sum(len(bar.slots) * (bar.end_ms - bar.start_ms) for bar in layout.bars)
    share = used / (layout.total_ms * plan.device.num_slots * plan.num_devices)
    text = f"{ms_text(layout.total_ms)} ms a step, {share:.0%} of slot time in use"
    if plan.is_colocated and plan.sequential_ms > 0:
        text += f", predicted speed-up {plan.predicted_speedup:.2f}×"
    return text


def _draw(axes: Any, plan: Plan, layout: _Layout, colors: dict[str, str]) -> None:
    for device in range(plan.num_devices):
        add_bar(axes, 0, device * (1 + _GAP), layout.total_ms, 1.0, "#ffffff", edgecolor=FAINT, zorder=0.5)
    for stage, phase, start, end in layout.edges_ms:
        if end > start:
            axes.axvline(end, color=GRID, linewidth=0.8, linestyle=(0, (3, 2)), zorder=1)
            room = (end - start) / axes.get_xlim()[1] * 0.9 * WIDTH
            text = fitting((f"stage {stage} {phase}", f"{stage} {phase}", f"{stage}{phase[0].upper()}"), room)
            style = {"ha": "center", "va": "bottom", "fontsize": 9, "color": FAINT}
            axes.text((start + end) / 2, 1.02, text, transform=axes.get_xaxis_transform(), **style)
    for bar in layout.bars:
        color = colors[bar.module] if bar.phase == "forward" else lighter(colors[bar.module])
        for first, count in slot_runs(bar.slots):
            low = bar.device * (1 + _GAP) + first / plan.device.num_slots
            box = (bar.start_ms, low, bar.end_ms - bar.start_ms, plan.device.fraction(count))
            gid = f"{bar.module}/{bar.phase}/{bar.device}"
            add_bar(axes, *box, color, label=bar.module, edgecolor=colors[bar.module], linewidth=0.7, gid=gid)
