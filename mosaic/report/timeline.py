"""A picture of measured timelines under one time axis, a lane per slot."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mosaic.plan import Plan
from mosaic.report.figure import (
    FAINT,
    GLUE,
    GRID,
    INK,
    OUTSIDE,
    SHADES,
    WIDTH,
    add_bar,
    colors_of,
    fitting,
    lighter,
    new_figure,
    save_figure,
    set_head,
)
from mosaic.report.plan_view import ms_text, slot_runs
from mosaic.timeline import Span, Timeline

_Steps = Mapping[int, Sequence[Span]]
_MARGIN = 0.08
"""Free share of a lane above and below its bars."""


def draw_timelines(
    timelines: Sequence[Timeline],
    path: Path,
    *,
    plan: Plan | None = None,
    subtitle: str = "",
    num_steps: int = 2,
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
        num_steps: Number of consecutive whole steps to draw: those nearest to the median length.

    Raises:
        MosaicError: matplotlib is missing, or the file cannot be written.
        ValueError: ``timelines`` is empty, ``num_steps`` is under 1, or the suffix is unsupported.
    """
    save_figure(timeline_figure(timelines, plan=plan, subtitle=subtitle, num_steps=num_steps), path)


def timeline_figure(
    timelines: Sequence[Timeline],
    *,
    plan: Plan | None = None,
    subtitle: str = "",
    num_steps: int = 2,
) -> Any:
    """Returns the figure of ``draw_timelines``, with axes per timeline."""
    if not timelines or num_steps < 1:
        raise ValueError(f"{len(timelines)} timelines of {num_steps} steps; give at least one of each")
    steps = [choose_steps(timeline, num_steps) for timeline in timelines]
    spans = [span for drawn in steps for span in _flat(drawn)]
    modules = {span.module: None for span in spans if span.phase != "glue"}
    colors = colors_of([*(p.module for p in plan.placements), *modules] if plan else modules)
    entries = {name: colors[name] for name in colors if name in modules} | SHADES
    entries |= {"glue": GLUE} if any(span.phase == "glue" for span in spans) else {}
    entries |= {"outside of steps": OUTSIDE}
    lanes = [own.num_slots + any(not span.slots for span in own.spans) for own in timelines]
    figure = new_figure(
        [max(0.84, min(0.42 * count, 2.9)) for count in lanes],
        title="What ran when (measured)",
        subtitle=subtitle,
        legend=entries,
    )
    end_ms = max((_length_ms(_flat(drawn)) for drawn in steps), default=0.0) or 1.0
    for axes, timeline, drawn, count in zip(figure.axes, timelines, steps, lanes, strict=True):
        axes.set(xlim=(0, end_ms * 1.01), ylim=(count, 0), facecolor=OUTSIDE)
        names = [f"slot {lane}" if lane < timeline.num_slots else "no slot" for lane in range(count)]
        every = max(1, -(-count // 16))
        axes.set_yticks([lane + 0.5 for lane in range(0, count, every)], names[::every])
        axes.tick_params(axis="x", labelbottom=axes is figure.axes[-1])
        axes.tick_params(axis="y", labelsize=9.5 if count <= 8 else 7.5)
        set_head(axes, timeline.title, _fact(timeline, len(drawn)), pad=18)
        _draw(axes, drawn, colors, count)
    below = "milliseconds from the first step drawn"
    figure.axes[-1].set_xlabel(below if plan is None else f"{below}\n{_predicted(plan)}", fontsize=9.5)
    return figure


def _fact(timeline: Timeline, num_drawn: int) -> str:
    if not timeline.spans:
        return "nothing was recorded"
    fact = f"overlap {timeline.overlap:.0%} (share of lane time with another lane busy)"
    num_whole = len(whole_steps(timeline))
    if num_whole > num_drawn:
        fact += f"; drawn: {num_drawn} of {num_whole} steps, nearest to their median"
    return fact


def _predicted(plan: Plan) -> str:
    text = f"the plan predicted {ms_text(plan.predicted_ms)} ms a step for the modules alone"
    if plan.sequential_ms > 0:
        text += f", {plan.predicted_speedup:.2f}× over the sequential plan's {ms_text(plan.sequential_ms)} ms"
    return text + " (not measured)"


def _draw(axes: Any, steps: _Steps, colors: Mapping[str, str], lanes: int) -> None:
    origin = min((span.start_ms for span in _flat(steps)), default=0.0)
    for lane in range(1, lanes):
        axes.axhline(lane, color=GRID, linewidth=0.6, zorder=0.3)
    for step, spans in steps.items():
        start, length = min(span.start_ms for span in spans) - origin, _length_ms(spans)
        add_bar(axes, start, 0, length, lanes, "#ffffff", edgecolor="none", zorder=0.2)
        inches = length / axes.get_xlim()[1] * 0.9 * WIDTH
        texts = (f"step {step}: {ms_text(length)} ms", f"{ms_text(length)} ms")
        text = fitting(texts, inches) or (texts[0] if step == max(steps) else "")
        above = axes.get_xaxis_transform()
        axes.plot((start, start + length), (1.03, 1.03), "|-", color=INK, linewidth=0.7, transform=above, clip_on=False)
        axes.text(start + length / 2, 1.05, text, transform=above, ha="center", va="bottom", fontsize=9, color=FAINT)
        for span in spans:
            base = GLUE if span.phase == "glue" else colors[span.module]
            color = lighter(base) if span.phase == "backward" else base
            for first, count in slot_runs(span.slots) or ((lanes - 1, 1),):
                box = (span.start_ms - origin, first + _MARGIN, span.end_ms - span.start_ms, count - 2 * _MARGIN)
                gid, is_glue = f"{span.module}/{span.phase}/{step}", span.phase == "glue"
                label, zorder = ("", 1.5) if is_glue else (span.module, 2)
                add_bar(axes, *box, color, label=label, edgecolor=base, zorder=zorder, gid=gid)


def choose_steps(timeline: Timeline, num_steps: int) -> dict[int, tuple[Span, ...]]:
    """Returns the spans of ``num_steps`` consecutive whole steps, or of all if fewer.

    Their total is the nearest to the median of all such runs, the later in a tie: otherwise one stalled step on a busy
    machine would set the scale of the picture.
    """
    whole = whole_steps(timeline)
    runs = [whole[first : first + num_steps] for first in range(max(1, len(whole) - num_steps + 1))]
    lengths = [sum(_length_ms(spans) for _, spans in run) for run in runs]
    middle = statistics.median(lengths)
    nearest = min(range(len(runs)), key=lambda index: (abs(lengths[index] - middle), -index))
    return dict(runs[nearest])


def whole_steps(timeline: Timeline) -> list[tuple[int, tuple[Span, ...]]]:
    """Returns, in order, the steps with all modules and phases that usually run.

    A recording may begin or end inside a step, which then lacks modules or phases.
    """
    steps: dict[int, list[Span]] = {}
    for span in timeline.spans:
        steps.setdefault(span.step, []).append(span)
    work = {
        step: frozenset((span.module, span.phase) for span in spans if span.phase != "glue")
        for step, spans in steps.items()
    }
    counts = Counter(work.values())
    usual = max(counts, key=lambda ran: (counts[ran], len(ran)), default=frozenset())
    return [(step, tuple(steps[step])) for step in sorted(steps) if work[step] >= usual]


def _length_ms(spans: Sequence[Span]) -> float:
    """Returns the time from the first start to the last end."""
    return max((span.end_ms for span in spans), default=0.0) - min((span.start_ms for span in spans), default=0.0)


def _flat(steps: Mapping[int, Iterable[Span]]) -> list[Span]:
    return [span for spans in steps.values() for span in spans]
