"""A picture of measured timelines under one time axis, a lane per slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mosaic.plan import Plan
from mosaic.report.bars import ms_text, slot_runs
from mosaic.report.canvas import Canvas, check_path, draw_legend, legend_rows
from mosaic.report.palette import FAINT, GLUE, GRID, INK, OUTSIDE, colors_of, lighter
from mosaic.report.steps import Choice, choose_steps, flatten, length_ms, whole_steps
from mosaic.timeline import Span, Timeline

_WIDTH, _LEFT, _RIGHT = 10.0, 0.75, 0.25
_ABOVE, _BETWEEN = 0.52, 0.14
_BAR_SHARE = 0.84
"""Height of a bar as a share of its lanes."""


def draw_timelines(
    timelines: Sequence[Timeline],
    path: Path,
    *,
    plan: Plan | None = None,
    subtitle: str = "",
    num_steps: int = 2,
    choice: Choice = "last",
) -> None:
    """Draws measured timelines one above the other, each from 0 on one shared axis in milliseconds.

    A module's forward has its colour, its backward a lighter shade of it, glue is grey; white inside a step is
    idle. A step is as long as from its first span's start to its last span's end: what the loop does between
    steps (optimizer, data) lies on grey ground and is not counted.

    Args:
        timelines: Timelines, the first on top; one may be empty.
        path: A ``.png`` or ``.svg`` file; written whole or not at all.
        plan: Gives modules the colours that they have in the plan's picture, and the predicted step that is
            quoted, as such, below the axis.
        subtitle: Written under the title, such as the machine and the date.
        num_steps: Number of consecutive whole steps to draw.
        choice: The ``last`` steps, or the ``typical`` ones nearest to the median length, with a note in the picture.

    Raises:
        MosaicError: matplotlib is missing, or the file cannot be written.
        ValueError: ``timelines`` is empty, ``num_steps`` is under 1, or the suffix is unsupported.
    """
    check_path(path)
    timeline_canvas(timelines, plan=plan, subtitle=subtitle, num_steps=num_steps, choice=choice).save(path)


def timeline_canvas(
    timelines: Sequence[Timeline],
    *,
    plan: Plan | None = None,
    subtitle: str = "",
    num_steps: int = 2,
    choice: Choice = "last",
) -> Canvas:
    """Returns the page of ``draw_timelines``, with axes per timeline."""
    if not timelines or num_steps < 1:
        raise ValueError(f"{len(timelines)} timelines of {num_steps} steps; give at least one of each")
    drawn_steps = [choose_steps(timeline, num_steps, choice) for timeline in timelines]
    spans = [span for steps in drawn_steps for span in flatten(steps)]
    modules = [placement.module for placement in plan.placements] if plan else []
    ran = {span.module: None for span in spans if span.phase != "glue"}
    colors = {name: color for name, color in colors_of([*modules, *ran]).items() if name in ran}
    legend = legend_rows(colors, glue=any(span.phase == "glue" for span in spans), page_width=_WIDTH - _LEFT - _RIGHT)
    heights = [_panel_height(timeline) for timeline in timelines]
    head = 0.62 if subtitle else 0.42
    body = sum(heights) + len(heights) * _ABOVE + (len(heights) - 1) * _BETWEEN
    canvas = Canvas(width=_WIDTH, height=head + body + 0.72 + 0.24 * len(legend) + (0.22 if plan else 0.0))
    canvas.text(0.2, 0.32, "What ran when (measured)", size=13, fontweight="bold")
    if subtitle:
        canvas.text(0.2, 0.54, subtitle, color=FAINT)
    end_ms = max((length_ms(flatten(steps)) for steps in drawn_steps), default=0.0) or 1.0
    top = head
    for index, (timeline, steps, height) in enumerate(zip(timelines, drawn_steps, heights, strict=True)):
        axes = canvas.panel(_LEFT, top + _ABOVE, _WIDTH - _LEFT - _RIGHT, height)
        _prepare(axes, timeline, end_ms, last=index == len(timelines) - 1)
        _head(canvas, timeline, top, len(steps), choice)
        _draw_steps(canvas, axes, steps, colors, timeline)
        top += _ABOVE + height + _BETWEEN
    _foot(canvas, top - _BETWEEN, plan)
    draw_legend(canvas, legend, _LEFT, canvas.height - 0.08 - 0.24 * len(legend))
    return canvas


def _panel_height(timeline: Timeline) -> float:
    """Lanes of 0.42 inches; a panel of at most 2.9 inches."""
    return max(0.84, min(0.42 * _num_lanes(timeline), 2.9))


def _num_lanes(timeline: Timeline) -> int:
    """One lane per slot, and one more for work outside slots."""
    return timeline.num_slots + any(not span.slots for span in timeline.spans)


def _prepare(axes: Any, timeline: Timeline, end_ms: float, *, last: bool) -> None:
    lanes = _num_lanes(timeline)
    axes.set(xlim=(0, end_ms * 1.01), ylim=(lanes, 0), facecolor=OUTSIDE)
    every = max(1, -(-lanes // 16))
    shown = [lane for lane in range(lanes) if lane % every == 0]
    names = [f"slot {lane}" if lane < timeline.num_slots else "no slot" for lane in shown]
    axes.set_yticks([lane + 0.5 for lane in shown], names)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=last)
    if lanes > 8:
        axes.tick_params(axis="y", labelsize=7.5)
    if last:
        axes.set_xlabel("milliseconds from the first step drawn", color=INK, fontsize=10)


def _head(canvas: Canvas, timeline: Timeline, top: float, num_drawn: int, choice: Choice) -> None:
    end = canvas.text(_LEFT, top + 0.2, timeline.title, size=11.5, fontweight="bold")
    fact = f"overlap {timeline.overlap:.0%} (share of lane time with another lane busy)"
    num_whole = len(whole_steps(timeline))
    if choice == "typical" and num_whole > num_drawn:
        fact += f"; drawn: {num_drawn} of {num_whole} steps, nearest to their median"
    canvas.text(end + 0.15, top + 0.2, fact if timeline.spans else "nothing was recorded", color=FAINT)


def _draw_steps(
    canvas: Canvas,
    axes: Any,
    steps: Mapping[int, Sequence[Span]],
    colors: Mapping[str, str],
    timeline: Timeline,
) -> None:
    origin = min((span.start_ms for span in flatten(steps)), default=0.0)
    lanes = _num_lanes(timeline)
    for step, spans in steps.items():
        start = min(span.start_ms for span in spans) - origin
        end = max(span.end_ms for span in spans) - origin
        canvas.bar(axes, (start, 0, end - start, lanes), "#ffffff", edgecolor="none", zorder=0.2)
        _mark_length(canvas, axes, start, end, step=step, last=step == max(steps))
    for lane in range(1, lanes):
        axes.axhline(lane, color=GRID, linewidth=0.6, zorder=0.3)
    for step, spans in steps.items():
        for span in spans:
            _draw_span(canvas, axes, span, origin, colors, f"{timeline.title}/{span.module}/{span.phase}/{step}")


def _mark_length(canvas: Canvas, axes: Any, start: float, end: float, *, step: int, last: bool) -> None:
    """Draws an arrow over the step, 0.12 inches above the axes, with its length on it or, if short, behind it."""
    above = axes.get_xaxis_transform()
    position = axes.get_position()
    high = 1 + 0.12 / (position.height * canvas.height)
    arrow = {"arrowstyle": "<|-|>", "color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8}
    axes.annotate(
        "", xy=(start, high), xytext=(end, high), xycoords=above, textcoords=above, annotation_clip=False,
        arrowprops=arrow,
    )  # fmt: skip
    inches = position.width * canvas.width / axes.get_xlim()[1]
    texts = (f"step {step}: {ms_text(end - start)} ms", f"{ms_text(end - start)} ms")
    style = {"transform": above, "va": "center", "fontsize": 10, "color": INK}
    for text in texts:
        if canvas.measure(text) + 0.35 <= (end - start) * inches:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.text((start + end) / 2, high, text, ha="center", bbox=box, **style)
            return
    if last and canvas.measure(texts[0]) + 0.08 <= (axes.get_xlim()[1] - end) * inches:
        axes.text(end + 0.08 / inches, high, texts[0], ha="left", **style)


def _draw_span(canvas: Canvas, axes: Any, span: Span, origin: float, colors: Mapping[str, str], gid: str) -> None:
    glue = span.phase == "glue"
    color = GLUE if glue else colors[span.module]
    color = lighter(color) if span.phase == "backward" else color
    edge = GLUE if glue else colors[span.module]
    runs = slot_runs(span.slots) or ((int(axes.get_ylim()[0]) - 1, 1),)
    for first, count in runs:
        margin = (1 - _BAR_SHARE) / 2
        box = (span.start_ms - origin, first + margin, span.end_ms - span.start_ms, count - 2 * margin)
        canvas.bar(axes, box, color, edgecolor=edge, zorder=1.5 if glue else 2, gid=gid)
        if not glue:
            canvas.label(axes, box, span.module, color)


def _foot(canvas: Canvas, bottom: float, plan: Plan | None) -> None:
    if plan is None:
        return
    text = f"the plan predicted {ms_text(plan.predicted_ms)} ms a step for the modules alone"
    if plan.sequential_ms > 0:
        text += f", {plan.predicted_speedup:.2f}× over the sequential plan's {ms_text(plan.sequential_ms)} ms"
    canvas.text(_LEFT, bottom + 0.64, text + " (not measured)", color=FAINT)
