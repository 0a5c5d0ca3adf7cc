"""A picture of pipeline schedules: a row of tasks per rank, and below it the rank's memory against its limit.

::

    1F1B (simulated)   41.2 ms, 23 % bubbles
    rank 0  |F0|F1|F2|F3|    |B0|   |B1| ...
    80 GB   ___--====----------___            under a dashed line: the limit
    rank 1     |F0|F1|...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.rank_memory import MemoryTimeline, rank_timelines
from mosaic.pipelining.tasks import Task, TaskGraph
from mosaic.report.bars import ms_text
from mosaic.report.canvas import Canvas, check_path, draw_legend, legend_rows
from mosaic.report.palette import FAINT, GRID, INK, OUTSIDE, colors_of, lighter

_WIDTH, _LEFT, _RIGHT = 11.0, 0.85, 1.05
_HEAD, _ABOVE, _BETWEEN = 0.42, 0.3, 0.16
_MAX_PANEL = 4.8
_MEMORY_SHARE = 0.4
"""Share of a rank's height for its memory."""
_GAP_SHARE = 0.12
"""Share of a rank's height left white below it."""
_MAX_LABELS = 800
_SHADES = {ActionKind.FORWARD: 0.0, ActionKind.BACKWARD: 0.5, ActionKind.WEIGHTS: 0.78}
"""Share of white in a module's colour."""
_USED, _OVER = "#9fb3c1", "#c0392b"
_MEMORY_NOTE = (
    "under each rank its memory: grey what is in use, dashed the limit, red what is over it; right the most in use"
)
_GB = 1e9


SIMULATED = "Pipeline schedules (simulated)"
"""Title of simulated pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A simulated step."""

    title: str
    """Title, such as the schedule's name."""
    graph: TaskGraph
    """Its tasks, and the memory of its ranks."""
    start_ns: Sequence[int]
    """Start of each task."""

    @property
    def makespan_ns(self) -> int:
        """End of the last task."""
        return max((at + t.time_ns for at, t in zip(self.start_ns, self.graph.tasks, strict=True)), default=0)

    @property
    def bubble_share(self) -> float:
        """Idle share of the rows' time."""
        total = self.makespan_ns * self.graph.num_rows
        return 1 - sum(task.time_ns for task in self.graph.tasks) / total if total else 0.0


def draw_pipelines(runs: Sequence[PipelineRun], path: Path, *, title: str = SIMULATED, subtitle: str = "") -> None:
    """Draws simulated steps one above the other on one time axis, such as a baseline and ours.

    A module's forward has its colour, backward a lighter shade, backward for weights the lightest; white is a bubble.
    Under each rank is its memory over time: blue-grey in use, red over the limit, dashed the limit.

    Args:
        runs: Steps to draw, the first on top; the title of each other step compares it with the first.
        path: A ``.png`` or ``.svg`` file; written whole or not at all.
        title: Written at the top.
        subtitle: Written under the title, such as the model and the device.

    Raises:
        MosaicError: matplotlib is missing, or the file cannot be written.
        ValueError: ``runs`` is empty, a run's numbers of starts and tasks differ, or the suffix is unsupported.
    """
    check_path(path)
    pipelines_canvas(runs, title=title, subtitle=subtitle).save(path)


def pipelines_canvas(runs: Sequence[PipelineRun], *, title: str = SIMULATED, subtitle: str = "") -> Canvas:
    """Returns the page of ``draw_pipelines``, with axes per run."""
    if not runs:
        raise ValueError("no runs; give at least one simulated step")
    for run in runs:
        if len(run.start_ns) != len(run.graph.tasks):
            raise ValueError(f"{run.title!r} has {len(run.start_ns)} starts of {len(run.graph.tasks)} tasks")
    tasks = [task for run in runs for task in run.graph.tasks]
    colors = colors_of(part.module for task in tasks for part in task.parts)
    legend = legend_rows(
        colors,
        glue=False,
        weights=any(task.kind == ActionKind.WEIGHTS for task in tasks),
        page_width=_WIDTH - _LEFT - _RIGHT,
    )
    uses = [rank_timelines(run.graph, run.start_ns) for run in runs]
    most = _most_bytes(runs, uses)
    heights = [_panel_height(run, with_memory=most > 0) for run in runs]
    head = _HEAD + (0.2 if subtitle else 0.0)
    body = sum(heights) + len(runs) * _ABOVE + (len(runs) - 1) * _BETWEEN
    note = 0.22 if most else 0.0
    canvas = Canvas(width=_WIDTH, height=head + body + 0.66 + note + 0.24 * len(legend))
    canvas.text(0.2, 0.3, title, size=13, fontweight="bold")
    if subtitle:
        canvas.text(0.2, 0.52, subtitle, color=FAINT)
    end_ms = max(run.makespan_ns for run in runs) / 1e6 or 1.0
    top = head
    for index, (run, use, height) in enumerate(zip(runs, uses, heights, strict=True)):
        axes = canvas.panel(_LEFT, top + _ABOVE, _WIDTH - _LEFT - _RIGHT, height)
        axes.set(xlim=(0, end_ms * 1.005), ylim=(run.graph.num_ranks or 1, 0), facecolor=OUTSIDE)
        _head(canvas, run, runs[0], top)
        _Panel(canvas=canvas, axes=axes, run=run, colors=colors, most_bytes=most).draw(use)
        axes.tick_params(axis="x", labelbottom=index == len(runs) - 1)
        top += _ABOVE + height + _BETWEEN
    axes.set_xlabel("milliseconds from the start of the step", color=INK, fontsize=10)
    if most:
        canvas.text(_LEFT, top - _BETWEEN + 0.62, _MEMORY_NOTE, color=FAINT, size=9)
    draw_legend(canvas, legend, _LEFT, canvas.height - 0.08 - 0.24 * len(legend))
    return canvas


def _most_bytes(runs: Sequence[PipelineRun], uses: Sequence[Sequence[MemoryTimeline]]) -> int:
    """Top of the memory scale of all ranks and runs; 0 without known memory."""
    used = max((line.peak_bytes for use in uses for line in use), default=0)
    return max([used, *(limit for run in runs for limit in run.graph.limit_bytes)]) if used else 0


def _panel_height(run: PipelineRun, *, with_memory: bool) -> float:
    ranks = max(1, run.graph.num_ranks)
    lanes = max(run.graph.rank_of.count(rank) for rank in set(run.graph.rank_of) or {0})
    row_height = (0.3 + 0.14 * (max(1, lanes) - 1)) / (1 - _GAP_SHARE - (_MEMORY_SHARE if with_memory else 0))
    return max(0.5, min(row_height * ranks, _MAX_PANEL))


def _head(canvas: Canvas, run: PipelineRun, first: PipelineRun, top: float) -> None:
    end = canvas.text(_LEFT, top + 0.2, run.title, size=11.5, fontweight="bold")
    text = f"{ms_text(run.makespan_ns / 1e6)} ms, {run.bubble_share:.1%} bubbles"
    if run is not first and run.makespan_ns:
        text += f"; {first.makespan_ns / run.makespan_ns:.2f}× as fast as {first.title}"
    canvas.text(end + 0.15, top + 0.2, text if run.graph.tasks else "nothing runs", color=FAINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One run's axes: rank r lies between r and r + 1, downwards."""

    canvas: Canvas
    axes: Any
    run: PipelineRun
    colors: dict[str, str]
    most_bytes: int

    def draw(self, use: Sequence[MemoryTimeline]) -> None:
        graph, end_ms = self.run.graph, self.run.makespan_ns / 1e6
        self.canvas.bar(self.axes, (0, 0, end_ms, graph.num_ranks), "#ffffff", edgecolor="none", zorder=0.2)
        for rank in range(1, graph.num_ranks):
            self.axes.axhline(rank, color=GRID, linewidth=0.6, zorder=0.3)
        self._draw_tasks()
        every = max(1, -(-graph.num_ranks // 16))
        shown = range(0, graph.num_ranks, every)
        self.axes.set_yticks(
            [rank + self._bars_share / 2 + _GAP_SHARE / 2 for rank in shown], map("rank {}".format, shown)
        )
        self.axes.tick_params(axis="y", length=0, labelsize=9.5 if every == 1 and graph.num_ranks <= 8 else 7.5)
        if self.most_bytes:
            for rank, line in enumerate(use):
                self._draw_memory(rank, line, label=rank % every == 0)

    @property
    def _bars_share(self) -> float:
        return 1 - _GAP_SHARE - (_MEMORY_SHARE if self.most_bytes else 0.0)

    def _draw_tasks(self) -> None:
        graph = self.run.graph
        inches = self.axes.get_position().width * self.canvas.width / self.axes.get_xlim()[1]
        widths = sorted(task.time_ns / 1e6 * inches for task in graph.tasks)
        is_wide = bool(widths) and widths[len(widths) // 4] > 0.03  # else edges would hide what they enclose
        bars: defaultdict[tuple[int, int, int, str, ActionKind], list[tuple[float, float]]] = defaultdict(list)
        for task, start in zip(graph.tasks, self.run.start_ns, strict=True):
            for at, part in enumerate(task.parts):
                key = task.row, at, len(task.parts), part.module, task.kind
                bars[key].append((start / 1e6, task.time_ns / 1e6))
        for (row, at, count, module, kind), spans in bars.items():
            low, height = self._place(row, at, count)
            self.axes.broken_barh(
                spans, (low, height), facecolor=lighter(self.colors[module], _SHADES[kind]),
                edgecolor="white" if is_wide else "none", linewidth=0.5, zorder=2,
                gid=f"{self.run.title}/{row}/{module}/{kind}",
            )  # fmt: skip
        if is_wide and len(graph.tasks) <= _MAX_LABELS:
            for task, start in zip(graph.tasks, self.run.start_ns, strict=True):
                if task.time_ns / 1e6 * inches > 0.08 * len(str(task.microbatch)) + 0.04:
                    self._label(task, start)

    def _place(self, row: int, at: int = 0, count: int = 1) -> tuple[float, float]:
        """Top and height of one of ``count`` modules that a task of the row mixes."""
        rank = self.run.graph.rank_of[row]
        lanes = [other for other, own in enumerate(self.run.graph.rank_of) if own == rank]
        height = self._bars_share / len(lanes)
        return rank + _GAP_SHARE / 2 + height * (lanes.index(row) + at / count), height / count

    def _label(self, task: Task, start: int) -> None:
        low, height = self._place(task.row)
        color = lighter(self.colors[task.parts[0].module], _SHADES[task.kind])
        self.canvas.label(self.axes, (start / 1e6, low, task.time_ns / 1e6, height), str(task.microbatch), color)

    def _draw_memory(self, rank: int, line: MemoryTimeline, *, label: bool) -> None:
        limit = self.run.graph.limit_bytes[rank] if self.run.graph.limit_bytes else 0
        bottom = rank + 1 - _GAP_SHARE / 2
        scale = (_MEMORY_SHARE - 0.04) / self.most_bytes
        times = [at / 1e6 for at in line.at_ns] + [self.run.makespan_ns / 1e6]
        used = [*line.in_use_bytes, line.in_use_bytes[-1]]
        gid = f"{self.run.title}/{rank}"
        fills = [(0, used, _USED, "memory")]
        if limit and max(used) > limit:
            fills.append((limit, [max(size, limit) for size in used], _OVER, "over"))
        for base, sizes, color, name in fills:
            heights = [bottom - scale * size for size in sizes]
            self.axes.fill_between(
                times, heights, bottom - scale * base, step="post", color=color, linewidth=0, zorder=1.5,
                gid=f"{gid}/{name}",
            )  # fmt: skip
        if limit:
            self.axes.plot(
                (0, times[-1]), [bottom - scale * limit] * 2, color=INK, linewidth=0.7, linestyle=(0, (4, 2)), zorder=3,
                gid=f"{gid}/limit",
            )  # fmt: skip
        if label:
            most = max(used)
            self.axes.text(
                1.008, bottom - _MEMORY_SHARE / 2,
                f"{most / _GB:.3g} of {limit / _GB:.3g} GB" if limit else f"{most / _GB:.3g} GB",
                transform=self.axes.get_yaxis_transform(), fontsize=7.5, va="center",
                color=_OVER if limit and most > limit else FAINT,
            )  # fmt: skip
