"""Tables of planned pipeline steps, and a picture of the tasks of every rank.

::

    1F1B (simulated)   41.2 ms, 23 % bubbles
    rank 0  |F0|F1|F2|F3|    |B0|   |B1| ...
    rank 1     |F0|F1|...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosaic.pipelining.planner import PlannedStep
from mosaic.pipelining.tasks import ActionKind, TaskGraph
from mosaic.report.figure import Bar, Panel, colors_of, lane_figure, lighter, save_figure
from mosaic.report.plan_view import ms_text
from mosaic.report.table import make_table

if TYPE_CHECKING:
    from rich.table import Table

_GAP = 0.12
"""White share of a rank's height."""
_MAX_LABELS = 800
_SHADES = {ActionKind.FORWARD: 0.0, ActionKind.BACKWARD: 0.5, ActionKind.WEIGHTS: 0.78}
"""Share of white by kind of task."""
SIMULATED = "Pipeline schedules (simulated)"
"""Title of simulated pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A step of a pipeline, simulated or measured."""

    title: str
    """Title, such as the schedule's name."""
    graph: TaskGraph
    start_ns: Sequence[int]
    """Start of each task."""

    @property
    def makespan_ns(self) -> int:
        """End of the last task."""
        return max((at + t.time_ns for at, t in zip(self.start_ns, self.graph.tasks, strict=True)), default=0)


def draw_pipelines(runs: Sequence[PipelineRun], path: Path, *, title: str = SIMULATED) -> None:
    """Writes ``pipelines_figure`` as a ``.png`` or ``.svg`` file, atomically.

    Raises:
        MosaicError: matplotlib is missing, or the file cannot be written.
        ValueError: The numbers of a run's starts and tasks differ, or the suffix is unsupported.
    """
    save_figure(pipelines_figure(runs, title=title), path)


def pipelines_figure(runs: Sequence[PipelineRun], *, title: str = SIMULATED) -> Any:
    """Returns the figure of stacked steps with a common time axis, compared with the first.

    Forwards have the module's colour, backwards a lighter shade, backwards for weights the lightest; bubbles are white.
    """
    tasks = [task for run in runs for task in run.graph.tasks]
    colors = colors_of(part.module for task in tasks for part in task.parts)
    weights = ", lightest: for weights" if any(task.kind == ActionKind.WEIGHTS for task in tasks) else ""
    most_rows = max((run.graph.rank_of.count(rank) for run in runs for rank in run.graph.rank_of), default=1)
    panels = [
        Panel(
            title=f"{run.title}: {_fact(run, runs[0])}",
            lanes=[f"rank {rank}" for rank in range(run.graph.num_ranks)],
            spans=[(0.0, run.makespan_ns / 1e6, ())],
            bars=[*_bars(run, colors)],
        )
        for run in runs
    ]
    return lane_figure(
        panels,
        title=title,
        legend=colors | {f"darker: forward, lighter: backward{weights}": "", "idle": "#ffffff"},
        axis="milliseconds from the start of the step",
        lane_inches=(0.3 + 0.14 * (most_rows - 1)) / (1 - _GAP),
    )


def _fact(run: PipelineRun, first: PipelineRun) -> str:
    if not run.graph.tasks:
        return "no tasks"
    busy = sum(task.time_ns for task in run.graph.tasks) / (run.makespan_ns * run.graph.num_rows)
    text = f"{ms_text(run.makespan_ns / 1e6)} ms, {1 - busy:.1%} bubbles"
    if run is first or first.title == "measured":  # a simulation of the same step
        return text
    return f"{text}; {first.makespan_ns / run.makespan_ns:.2f}× as fast as {first.title}"


def _bars(run: PipelineRun, colors: Mapping[str, str]) -> Iterator[Bar]:
    """Yields a rank's rows from the top; modules of a mixed task share its row."""
    is_sparse = len(run.graph.tasks) <= _MAX_LABELS  # edges would hide narrow tasks
    for task, start in zip(run.graph.tasks, run.start_ns, strict=True):
        rank = run.graph.rank_of[task.row]
        rows = [row for row, own in enumerate(run.graph.rank_of) if own == rank]
        row_height = (1 - _GAP) / len(rows)
        height = row_height / len(task.parts)
        for index, part in enumerate(task.parts):
            yield Bar(
                start_ms=start / 1e6,
                end_ms=(start + task.time_ns) / 1e6,
                low=rank + _GAP / 2 + row_height * rows.index(task.row) + height * index,
                height=height,
                color=lighter(colors[part.module], _SHADES[task.kind]),
                edge="white" if is_sparse else "none",
                label=str(task.microbatch) if index == 0 and is_sparse else "",
                gid=f"{run.title}/{task.row}/{part.module}/{task.kind}",
            )


def pipeline_table(planned: PlannedStep, contenders: Mapping[str, PlannedStep | str]) -> Table:
    """Returns simulated rows of the plan and of the baselines; a baseline without a plan has its reason."""
    rows, caption = [], "nothing here was measured"
    for name, plan in {"planned": planned, **contenders}.items():
        if isinstance(plan, str):
            rows.append([name, "-", "-", "-", "-", plan])
            continue
        ratio = plan.makespan_ns / planned.makespan_ns if planned.makespan_ns else 1.0
        bubbles, fullest = f"{100 * plan.bubble_share:.1f}", f"{max(plan.timed.peak_bytes) / 1e9:.1f}"
        rows.append([name, f"{plan.makespan_ns / 1e6:.1f}", f"{ratio:.2f}", bubbles, fullest, _policies(plan)])
        if any(task.kind is ActionKind.WEIGHTS for task in plan.graph.tasks):
            caption += f"\n{name} computes weight gradients separately, which Mosaic cannot run: it is not chosen"
    columns = ("schedule", ">step\nms", ">× ours", ">bubbles\n%", ">fullest rank\nGB", "activations")
    return make_table("One step, simulated", columns, rows, caption=caption, bold=(0,))


def _policies(planned: PlannedStep) -> str:
    if isinstance(planned.strategies, str):
        return planned.strategies
    layers = [index for choices in planned.strategies.values() for index in choices]
    changed = sum(index > 0 for index in layers)
    return f"keep, except {changed / len(layers):.0%} of layers" if layers else "keep"
