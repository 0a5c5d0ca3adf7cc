"""``mosaic run``: trains a model plain and colocated in turn, here or on torchrun's ranks."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mosaic.artifact import load
from mosaic.cli.options import Json, Method, Model, Strict, console_beside, write_json
from mosaic.plan import Plan

if TYPE_CHECKING:
    from rich.table import Table

    import mosaic
    from mosaic.cli.workload import Loop
    from mosaic.profiler import ProfileSettings
    from mosaic.ranks.compare import MeasuredMethod
    from mosaic.report.progress import Progress

_ROUNDS = 4
_WARM_STEPS = 2
_STEPS_BEFORE = 10
"""Steps after which the trial of a loop without an optimizer begins."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train a model for some steps, plain and colocated in turn, and print the measurements.

    The default loss is the mean square of the outputs. Under torchrun
    (torchrun --nproc-per-node 2 --no-python mosaic run --model train.py:make) it trains on all ranks, in turn with
    data-parallel training, and the model's sample is a rank's batch.
    """

    model: Model
    plan: Path | None = None
    """A plan of `mosaic plan`, which runs unchanged. By default a plan is solved now."""
    method: Method = "auto"
    compare: bool = False
    """Measure the plans of all methods one after the other."""
    steps: int = 20
    """Steps of each."""
    output: Path | None = None
    """Folder for timeline.png and trace.json."""
    strict: Strict = False
    json: Json = None

    def execute(self) -> None:
        """Trains; under torchrun on all ranks."""
        from mosaic.profiler import ProfileSettings
        from mosaic.ranks.compare import COMPARED
        from mosaic.ranks.world.world import World

        if self.steps < 1:
            raise ValueError(f"steps={self.steps}; use 1 or more")
        if self.compare and (self.plan is not None or self.method != "auto"):
            raise ValueError("--compare measures the plans of all methods; leave --plan and --method out")
        methods = COMPARED if self.compare else (self.method,)
        fixed = load(Plan, self.plan) if self.plan is not None else None
        settings = ProfileSettings(strict=self.strict)
        (self._run_on_ranks if World.is_there() else self._run_here)(methods, fixed, settings)

    def _run_here(self, methods: Sequence[str], fixed: Plan | None, settings: ProfileSettings) -> None:
        from mosaic.report.progress import Progress

        console = console_beside(self.json)
        rows = {}
        for method in methods:
            with Progress() as progress:
                measured = run_in_turn(self, method, fixed, settings, progress)
            if self.compare:
                console.print(f"planned by {method}:", highlight=False)
            console.print(measured.description, highlight=False)
            for name, value in measured.figures().items():
                console.print(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}", highlight=False)
            rows[method] = dataclasses.asdict(measured)
        write_json(json.dumps(rows if self.compare else rows[methods[0]], indent=2) + "\n", self.json)

    def _run_on_ranks(self, methods: Sequence[str], fixed: Plan | None, settings: ProfileSettings) -> None:
        from mosaic.cli.workload import load_workload
        from mosaic.profile import note_of_others
        from mosaic.ranks.compare import compare_plans, leave

        if self.output is not None:
            raise ValueError("--output draws what one process ran; leave it out under torchrun")
        steps = max(1, round(self.steps / _ROUNDS))
        measured = compare_plans(
            lambda: load_workload(self.model), methods, plan=fixed, rounds=_ROUNDS, steps=steps, settings=settings
        )
        is_first = leave()
        for row in measured:
            if row.plan is not None:
                note_of_others(row.foreign_cpu_share, row.plan.device, strict=self.strict)
        if is_first:
            console_beside(self.json).print(measured_table(measured))
            write_json(measured, self.json)


@dataclass(frozen=True, slots=True)
class MeasuredInTurn:
    """Measurements of both loops."""

    description: str
    """Description of the plan."""
    active: bool
    """True if modules ran on lanes."""
    step_ms_plain: float
    """Median step of the plain loop at its best: its own process, all cores, the faster way of waiting."""
    plain_waiting: str
    """Way of waiting of that loop's threads."""
    step_ms_colocated: float
    """Median step of the colocated loop."""
    speedup: float | None
    """Plain over colocated; None if nothing was colocated, because both are then the plain loop."""
    overlap: float
    """Share of lane time with another lane busy."""
    metrics: dict[str, float]
    """Measured medians by module and phase."""
    foreign_cpu_share: float | None
    """Share of the CPU time of other processes during timed steps; None if unknown."""
    note: str
    """Note about other processes on the CPU; empty if they hardly used it."""

    def figures(self) -> dict[str, float | bool | str]:
        """Returns the lines to print."""
        speedup: float | str = "none: the model runs as it was" if self.speedup is None else self.speedup
        if self.note:
            speedup = f"{speedup if isinstance(speedup, str) else format(speedup, '.3f')} ({self.note})"
        names = ("active", "step_ms_plain", "plain_waiting", "step_ms_colocated")
        return {**{name: getattr(self, name) for name in names}, "speedup": speedup, "overlap": self.overlap}


def run_in_turn(
    command: Run, method: str, plan: Plan | None, settings: ProfileSettings, progress: Progress
) -> MeasuredInTurn:
    """Takes training steps of both loops, in rounds, and returns the measurements.

    Without a plan Mosaic first solves for one and tries it, as in a user's loop; those steps are not timed. The plain
    loop runs in processes of its own with both ways of waiting, and the faster counts. A round is repeated while other
    processes use the CPU, as long as ``settings`` allow.

    Raises:
        UnstableMeasurementError: Other processes used the CPU, and ``settings`` are strict.
    """
    import mosaic
    from mosaic.child import WAITING, Child, faster_of
    from mosaic.cli.workload import Loop, load_workload
    from mosaic.profiler import Retries
    from mosaic.take_turns import take_turns

    workload = load_workload(command.model)
    handle = mosaic.colocate(
        workload.model,
        sample=workload.sample,
        plan=plan,
        options=mosaic.Options(method=method, profiling=settings, progress=progress.follow("profiling the modules")),
    )
    loop = Loop(workload)
    _decide(handle, loop, progress)
    per_round = max(1, round(command.steps / _ROUNDS))
    retries = Retries(settings, handle.plan.device)
    progress.phase("training plain and colocated in turn", total=_ROUNDS)
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child("mosaic.cli.workload:plain_loop", command.model, passive=passive))
            for passive in (False, True)
        ]

        def one_round(steps: int) -> list[list[float]]:
            runs = {name: partial(child.call, "steps", steps) for name, child in zip(WAITING, children, strict=True)}
            turns = take_turns({**runs, "colocated": partial(loop.steps, steps)}, 1)
            return [list(chain(*rounds)) for rounds in turns.values()]

        one_round(_WARM_STEPS)
        rounds = []
        for _ in range(_ROUNDS):
            rounds.append(retries.quietest(lambda: one_round(per_round))[0])
            progress.advance()
    *plain, colocated = (list(chain(*samples)) for samples in zip(*rounds, strict=True))
    faster = faster_of(plain)
    metrics = handle.metrics()
    if command.output is not None:
        from mosaic.report.timeline import draw_timelines
        from mosaic.report.trace import write_trace

        timeline = handle.timeline()
        draw_timelines([timeline], command.output / "timeline.png", plan=handle.plan, subtitle=retries.note)
        write_trace([timeline], command.output / "trace.json")
    plain_ms, colocated_ms = statistics.median(plain[faster]), statistics.median(colocated)
    measured = MeasuredInTurn(
        description=handle.describe(),
        active=handle.active,
        step_ms_plain=plain_ms,
        plain_waiting=WAITING[faster],
        step_ms_colocated=colocated_ms,
        speedup=plain_ms / colocated_ms if handle.active else None,
        overlap=metrics["overlap"],
        metrics=metrics,
        foreign_cpu_share=retries.taken.share,
        note=retries.note,
    )
    handle.remove()
    return measured


def _decide(handle: mosaic.Handle, loop: Loop, progress: Progress) -> None:
    """Takes the steps of the trial, untimed."""
    import mosaic

    if not handle.is_trying:
        return
    most = mosaic.TrialSettings().max_steps + _STEPS_BEFORE
    progress.phase("trying plans on the loop", total=most)
    for _ in range(most):
        loop.steps(1)
        progress.advance()
        if not handle.is_trying:
            break
    handle.clear_timeline()


def measured_table(measured: Sequence[MeasuredMethod]) -> Table:
    """Returns one row per planner, with columns of measured and predicted times."""
    from mosaic.profile import note_of_others
    from mosaic.report.table import make_table

    rows, lines = (
        [],
        ["medians; a step ends with its slowest rank; held: parameters, gradients, optimizer, most on a rank"],
    )
    for row in measured:
        if row.plan is None:
            rows.append([row.method, *["-"] * 6])
            lines.append(f"{row.method}: {row.reason}")
            continue
        times = (statistics.median(row.step_ms), statistics.median(row.ddp_ms))
        rows.append(
            [
                row.method,
                *(f"{time_ms:.1f}" for time_ms in times),
                f"{statistics.median(row.ratios):.2f}",
                f"{row.predicted_ms:.1f}" if row.predicted_ms else "-",
                f"{sum(row.sent_bytes.values()) / 1e6:.2f}",
                f"{max(row.held_bytes) / 1e6:.1f} ({max(row.ddp_held_bytes) / 1e6:.1f})",
            ]
        )
        if note := note_of_others(row.foreign_cpu_share, row.plan.device):
            lines.append(f"{row.method}: {note}")
        if row.same_as:
            lines.append(f"{row.method}: the same plan as {row.same_as}")
    numbers = (
        *("step ms\nmeasured", "DDP ms\nmeasured", "ratio\nmeasured"),
        *("modules\nms pre-\ndicted", "sent MB\na step", "held MB\n(DDP)"),
    )
    columns = [("planner", False), *((heading, True) for heading in numbers)]
    title = "Plans measured on these ranks, in turn with data-parallel training"
    return make_table(title, columns, rows, caption="\n".join(lines))
