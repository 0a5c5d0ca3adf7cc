"""``mosaic run``: trains a model plain and colocated in turn, in one process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mosaic.artifact import load_as
from mosaic.cli.options import Json, Method, Model, Strict, console_beside, write_json
from mosaic.plan import Plan
from mosaic.report.figure import picture_format, save_figure

if TYPE_CHECKING:
    from mosaic.profiler import ProfileSettings
    from mosaic.report.progress import Progress

_ROUNDS = 4
_WARM_STEPS = 2
_STEPS_BEFORE = 10
"""Steps before the trial of a loop without an optimizer."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train a model plain and colocated in turn, and print the measured steps.

    The default loss is the mean square of all outputs.
    """

    model: Model
    plan: Path | None = None
    """A plan written by `mosaic plan`, run without a trial. By default a plan is solved."""
    method: Method = "auto"
    steps: int = 20
    """Number of steps of each loop."""
    output: Path | None = None
    """Folder for timeline.png and trace.json."""
    strict: Strict = False
    json: Json = None

    def execute(self) -> None:
        from mosaic.profiler import ProfileSettings
        from mosaic.report.progress import Progress

        if self.steps < 1:
            raise ValueError(f"steps={self.steps}; use 1 or more")
        if self.output is not None:
            picture_format(self.output / "timeline.png")  # fails before the measurements
        plan = load_as(Plan, self.plan)
        with Progress() as progress:
            row = run_in_turn(self, plan, ProfileSettings(strict=self.strict), progress)
        note = f" ({row['note']})" if row["note"] else ""
        speedup = "none; the plain loop runs" if row["speedup"] is None else f"{row['speedup']:.3f}"
        lines = (
            row["description"],
            f"step of the plain loop: {row['step_ms_plain']:.3f} ms (its threads wait {row['plain_waiting']})",
            f"step with Mosaic: {row['step_ms_colocated']:.3f} ms",
            f"speed-up: {speedup}{note}",
            f"overlap: {row['overlap']:.0%} of lane time with another lane busy",
        )
        console_beside(self.json).print(*lines, sep="\n", markup=False, highlight=False)
        write_json(json.dumps(row, indent=2) + "\n", self.json)


def run_in_turn(command: Run, plan: Plan | None, settings: ProfileSettings, progress: Progress) -> dict[str, Any]:
    """Trains both loops in rounds and returns the measurements as plain data.

    Without a plan, Mosaic solves for one and tries it, as in a user's loop; these steps are not timed. The plain loop
    runs in a process of its own for each ``OMP_WAIT_POLICY``, and the faster counts. ``settings`` limit how often a
    round is repeated because other processes use the CPU.

    Raises:
        UnstableMeasurementError: Other processes used the CPU, and ``settings`` are strict.
    """
    import mosaic
    from mosaic.child import plain_loops
    from mosaic.cli.workload import Loop, load_workload
    from mosaic.profiler import Retries
    from mosaic.take_turns import take_turns

    workload = load_workload(command.model)
    loop, max_steps = Loop(workload), mosaic.TrialSettings().max_steps + _STEPS_BEFORE
    loop.steps(1)  # a wrong loss fails before the measurements
    follow = progress.follow("profiling the modules")
    options = mosaic.Options(method=command.method, profiling=settings, progress=follow)
    handle = mosaic.colocate(workload.model, sample=workload.sample, plan=plan, options=options)
    if handle.is_trying:
        progress.phase("trying plans on the loop", total=max_steps)
    for _ in range(max_steps):
        if not handle.is_trying:
            break
        loop.steps(1)
        progress.advance()
    handle.clear_timeline()
    retries = Retries(settings, handle.plan.device)
    progress.phase("training plain and colocated in turn", total=_ROUNDS)
    with plain_loops("mosaic.cli.workload:plain_loop", command.model) as runs:

        def run_round(steps: int) -> dict[str, list[list[float]]]:
            plain = {name: partial(call, "steps", steps) for name, call in runs.items()}
            return take_turns({**plain, "colocated": partial(loop.steps, steps)}, range(1))

        run_round(_WARM_STEPS)
        times_ms: dict[str, list[float]] = {name: [] for name in (*runs, "colocated")}
        for _ in range(_ROUNDS):
            turns = retries.quietest(lambda: run_round(max(1, round(command.steps / _ROUNDS))))[0]
            for name, visits in turns.items():
                times_ms[name] += chain(*visits)
            progress.advance()
    waiting = min(runs, key=lambda name: median(times_ms[name]))
    plain_ms, colocated_ms = median(times_ms[waiting]), median(times_ms["colocated"])
    if command.output is not None:
        from mosaic.report.timeline import timeline_figure, write_trace

        folder, timeline = command.output, handle.timeline()
        save_figure(timeline_figure([timeline], plan=handle.plan, subtitle=retries.note), folder / "timeline.png")
        write_trace([timeline], folder / "trace.json")
    metrics = handle.metrics()
    row = {
        "description": handle.describe(),
        "active": handle.active,  # modules ran on lanes
        "step_ms_plain": plain_ms,
        "plain_waiting": waiting,
        "step_ms_colocated": colocated_ms,
        "speedup": plain_ms / colocated_ms if handle.active else None,  # otherwise both are the plain loop
        "overlap": metrics["overlap"],
        "metrics": metrics,
        "foreign_cpu_share": retries.taken.share,
        "note": retries.note,
    }
    handle.remove()
    return row
