"""The picture of a plan: a module as tall as its share of the device and as long as its predicted time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mosaic.plan import Plan
from mosaic.profile import note_of_others
from mosaic.report.bars import PlanBars, bars_of_plan, device_text, ms_text, slot_runs
from mosaic.report.figure import (
    WIDTH,
    add_bar,
    add_label,
    add_legend,
    check_path,
    fits,
    legend_rows,
    new_figure,
    save_figure,
    set_head,
)
from mosaic.report.palette import FAINT, GRID, OUTSIDE, colors_of, lighter

_GAP = 0.12
"""Empty height between the lanes of two devices, each 1.0 high."""
SHADES = {"darker: forward, lighter: backward": "", "idle": "#ffffff"}
"""Legend of phases."""


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
    save_figure(plan_figure(plan, sequential=sequential, subtitle=subtitle), path)


def plan_figure(plan: Plan, *, sequential: Plan | None = None, subtitle: str = "") -> Any:
    """Returns the figure of ``draw_plan``, with axes per plan."""
    if note := note_of_others(plan.foreign_cpu_share, plan.device):
        subtitle = "; ".join(filter(None, [subtitle, f"while its modules were measured, {note}"]))
    plans = [plan] if sequential is None else [sequential, plan]
    colors = colors_of([p.module for p in (*plan.placements, *plans[0].placements)])
    bars = [bars_of_plan(shown) for shown in plans]
    entries = colors | SHADES
    figure = new_figure(
        [max(1.0, min(1.15 * shown.num_devices, 4.5)) for shown in plans],
        title=f"The plan on {device_text(plan)}" + ("" if bars[-1].nominal else " (predicted)"),
        subtitle=subtitle,
        rows=legend_rows(entries),
    )
    for axes, shown, own in zip(figure.axes, plans, bars, strict=True):
        end_ms = max(other.total_ms for other in bars) or 1.0
        lanes = shown.num_devices
        axes.set(xlim=(0, end_ms * 1.01), ylim=(lanes * (1 + _GAP) - _GAP, 0), facecolor=OUTSIDE)
        kind, every = "cores" if shown.device.kind == "host" else "GPU", max(1, -(-lanes // 12))
        names = [f"{kind} {device}" for device in range(lanes)]
        if kind == "cores" and lanes == 1:
            names = ["all cores"]
        axes.set_yticks([device * (1 + _GAP) + 0.5 for device in range(0, lanes, every)], names[::every])
        set_head(axes, "colocated" if shown.is_colocated else "one module at a time", _fact(shown, own), pad=18)
        axes.tick_params(axis="x", labelbottom=axes is figure.axes[-1] and not own.nominal, bottom=not own.nominal)
        _draw(axes, shown, own, colors)
    if not bars[-1].nominal:
        figure.axes[-1].set_xlabel("predicted milliseconds")
    add_legend(figure, entries)
    return figure


def _fact(plan: Plan, bars: PlanBars) -> str:
    if bars.nominal:
        return "no times are predicted; lengths are nominal"
    used = sum(len(bar.slots) * (bar.end_ms - bar.start_ms) for bar in bars.bars)
    share = used / (bars.total_ms * plan.device.num_slots * plan.num_devices)
    text = f"{ms_text(bars.total_ms)} ms a step, {share:.0%} of slot time in use"
    if plan.is_colocated and plan.sequential_ms > 0:
        text += f", predicted speed-up {plan.predicted_speedup:.2f}×"
    return text


def _draw(axes: Any, plan: Plan, bars: PlanBars, colors: dict[str, str]) -> None:
    for device in range(plan.num_devices):
        add_bar(axes, 0, device * (1 + _GAP), bars.total_ms, 1.0, "#ffffff", edgecolor=FAINT, zorder=0.5)
    for stage, phase, start, end in bars.edges_ms:
        if end > start:
            axes.axvline(end, color=GRID, linewidth=0.8, linestyle=(0, (3, 2)), zorder=1)
            room = (end - start) / axes.get_xlim()[1] * 0.9 * WIDTH
            texts = (f"stage {stage} {phase}", f"{stage} {phase}", f"{stage}{phase[0].upper()}")
            text = next((text for text in texts if fits(text, room)), "")
            style = {"ha": "center", "va": "bottom", "fontsize": 9, "color": FAINT}
            axes.text((start + end) / 2, 1.02, text, transform=axes.get_xaxis_transform(), **style)
    for bar in bars.bars:
        color = colors[bar.module] if bar.phase == "forward" else lighter(colors[bar.module])
        for first, count in slot_runs(bar.slots):
            low = bar.device * (1 + _GAP) + first / plan.device.num_slots
            box = (bar.start_ms, low, bar.end_ms - bar.start_ms, plan.device.fraction(count))
            gid = f"{bar.module}/{bar.phase}/{bar.device}"
            add_bar(axes, *box, color, edgecolor=colors[bar.module], linewidth=0.7, gid=gid)
            add_label(axes, *box, bar.module, color)
