"""The picture of a plan: a module as tall as its share of the device and as long as its predicted time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mosaic.plan import Plan
from mosaic.profile import note_of_others
from mosaic.report.bars import PlanBars, bars_of_plan, ms_text, slot_runs
from mosaic.report.canvas import Canvas, check_path, draw_legend, legend_rows
from mosaic.report.palette import FAINT, GRID, INK, OUTSIDE, colors_of, lighter

_WIDTH, _LEFT, _RIGHT = 10.0, 0.95, 0.25
_ABOVE, _BETWEEN = 0.52, 0.14
_GAP = 0.12
"""Empty height between the lanes of two devices, each 1.0 high."""


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
    check_path(path)
    plan_canvas(plan, sequential=sequential, subtitle=subtitle).save(path)


def plan_canvas(plan: Plan, *, sequential: Plan | None = None, subtitle: str = "") -> Canvas:
    """Returns the page of ``draw_plan``, with axes per plan."""
    if note := note_of_others(plan.foreign_cpu_share, plan.device):
        subtitle = "; ".join(filter(None, [subtitle, f"while its modules were measured, {note}"]))
    shown = [(_name(plan), plan, bars_of_plan(plan))]
    if sequential is not None:
        shown.insert(0, (_name(sequential), sequential, bars_of_plan(sequential)))
    colors = colors_of(placement.module for placement in plan.placements)
    colors = colors_of([*colors, *(p.module for _, other, _ in shown for p in other.placements)])
    legend = legend_rows(colors, glue=False, page_width=_WIDTH - _LEFT - _RIGHT)
    heights = [max(1.0, min(1.15 * shown_plan.num_devices, 4.5)) for _, shown_plan, _ in shown]
    head = 0.62 if subtitle else 0.42
    body = sum(heights) + len(heights) * _ABOVE + (len(heights) - 1) * _BETWEEN
    canvas = Canvas(width=_WIDTH, height=head + body + (0.35 if shown[-1][2].nominal else 0.72) + 0.24 * len(legend))
    title = f"The plan on {_devices(plan)}" + ("" if shown[-1][2].nominal else " (predicted)")
    canvas.text(0.2, 0.32, title, size=13, fontweight="bold")
    if subtitle:
        canvas.text(0.2, 0.54, subtitle, color=FAINT)
    end_ms = max(bars.total_ms for _, _, bars in shown) or 1.0
    top = head
    for index, ((name, shown_plan, bars), height) in enumerate(zip(shown, heights, strict=True)):
        axes = canvas.panel(_LEFT, top + _ABOVE, _WIDTH - _LEFT - _RIGHT, height)
        _prepare(axes, shown_plan, bars, end_ms, last=index == len(shown) - 1)
        end = canvas.text(_LEFT, top + 0.2, name, size=11.5, fontweight="bold")
        canvas.text(end + 0.15, top + 0.2, _fact(shown_plan, bars), color=FAINT)
        _draw_stages(canvas, axes, shown_plan, bars)
        _draw_bars(canvas, axes, shown_plan, bars, colors)
        top += _ABOVE + height + _BETWEEN
    draw_legend(canvas, legend, _LEFT, canvas.height - 0.08 - 0.24 * len(legend))
    return canvas


def _name(plan: Plan) -> str:
    return "colocated" if plan.is_colocated else "one module at a time"


def _devices(plan: Plan) -> str:
    many = f"{plan.num_devices} × " if plan.num_devices > 1 else ""
    return f"{many}{plan.device.name}, {plan.device.num_slots} slots{' each' if many else ''}"


def _fact(plan: Plan, bars: PlanBars) -> str:
    if bars.nominal:
        return "no times are predicted; lengths are nominal"
    text = f"{ms_text(bars.total_ms)} ms a step, {_used(plan, bars):.0%} of slot time in use"
    if plan.is_colocated and plan.sequential_ms > 0:
        text += f", predicted speed-up {plan.predicted_speedup:.2f}×"
    return text


def _used(plan: Plan, bars: PlanBars) -> float:
    """Used share of slot time, between 0 and 1."""
    used = sum(len(bar.slots) * (bar.end_ms - bar.start_ms) for bar in bars.bars)
    return used / (bars.total_ms * plan.device.num_slots * plan.num_devices)


def _prepare(axes: Any, plan: Plan, bars: PlanBars, end_ms: float, *, last: bool) -> None:
    lanes = plan.num_devices
    axes.set(xlim=(0, end_ms * 1.01), ylim=(lanes * (1 + _GAP) - _GAP, 0), facecolor="white")
    kind = "cores" if plan.device.kind == "host" else "GPU"
    every = max(1, -(-lanes // 12))
    shown = range(0, lanes, every)
    axes.set_yticks(
        [device * (1 + _GAP) + 0.5 for device in shown],
        [f"{kind} {device}" if lanes > 1 else ("all cores" if kind == "cores" else "GPU 0") for device in shown],
    )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=last and not bars.nominal, bottom=not bars.nominal)
    if last and not bars.nominal:
        axes.set_xlabel("predicted milliseconds", color=INK, fontsize=10)


def _draw_stages(canvas: Canvas, axes: Any, plan: Plan, bars: PlanBars) -> None:
    """White ground and an outline per device, a line at the end of each stage, its name above."""
    for device in range(plan.num_devices):
        low = device * (1 + _GAP)
        canvas.bar(axes, (0, low, bars.total_ms, 1.0), "#ffffff", edgecolor=FAINT, linewidth=0.6, zorder=0.5)
        if device:
            canvas.bar(axes, (0, low - _GAP, axes.get_xlim()[1], _GAP), OUTSIDE, edgecolor="none", zorder=0.4)
    rest = axes.get_xlim()[1] - bars.total_ms
    canvas.bar(axes, (bars.total_ms, 0, rest, axes.get_ylim()[0]), OUTSIDE, edgecolor="none", zorder=0.6)
    per_inch = axes.get_xlim()[1] / (_WIDTH - _LEFT - _RIGHT)
    for stage, phase, start, end in bars.edges_ms:
        if end <= start:
            continue
        axes.axvline(end, color=GRID, linewidth=0.8, linestyle=(0, (3, 2)), zorder=1)
        room = (end - start) / per_inch - 0.06
        texts = (f"stage {stage} {phase}", f"{stage} {phase}", f"{stage}{phase[0].upper()}")
        fitting = next((text for text in texts if canvas.measure(text, 9) <= room), None)
        if fitting:
            axes.text(
                (start + end) / 2, 1.03, fitting, transform=axes.get_xaxis_transform(), ha="center", va="bottom",
                fontsize=9, color=FAINT,
            )  # fmt: skip


def _draw_bars(canvas: Canvas, axes: Any, plan: Plan, bars: PlanBars, colors: Mapping[str, str]) -> None:
    for bar in bars.bars:
        base = colors[bar.module]
        color = base if bar.phase == "forward" else lighter(base)
        for first, count in slot_runs(bar.slots):
            low = bar.device * (1 + _GAP) + first / plan.device.num_slots
            box = (bar.start_ms, low, bar.end_ms - bar.start_ms, plan.device.fraction(count))
            gid = f"{_name(plan)}/{bar.module}/{bar.phase}/{bar.device}"
            canvas.bar(axes, box, color, edgecolor=base, linewidth=0.7, zorder=2, gid=gid)
            canvas.label(axes, box, bar.module, color)
