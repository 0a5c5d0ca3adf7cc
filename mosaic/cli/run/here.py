"""Trains a user's model plain and colocated in turn."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import mosaic
from mosaic.child import WAITING, Child, faster_of
from mosaic.cli.workload import Loop, Workload
from mosaic.plan import Plan
from mosaic.profiler import ProfileSettings, Retries
from mosaic.report.progress import Progress
from mosaic.take_turns import take_turns

_ROUNDS = 4
_WARM_STEPS = 2
_STEPS_BEFORE = 10
"""Steps after which the trial of a loop without an optimizer begins."""


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
        return {
            "active": self.active,
            "step_ms_plain": self.step_ms_plain,
            "plain_waiting": self.plain_waiting,
            "step_ms_colocated": self.step_ms_colocated,
            "speedup": speedup,
            "overlap": self.overlap,
        }


def run_in_turn(
    where: str,
    workload: Workload,
    plan: Plan | None,
    steps: int,
    progress: Progress,
    *,
    settings: ProfileSettings,
    output: Path | None,
    method: str = "auto",
) -> MeasuredInTurn:
    """Takes ``steps`` training steps of each, in rounds, and returns the measurements.

    Without a plan Mosaic first solves for one and tries it, as in a user's loop; those steps are not timed. The plain
    loop runs in processes of its own with both ways of waiting, and the faster counts. A round is repeated while other
    processes use the CPU, as long as ``settings`` allow. Trains the model.

    Raises:
        UnstableMeasurementError: Other processes used the CPU, and ``settings`` are strict.
    """
    handle = mosaic.colocate(
        workload.model,
        sample=workload.sample,
        plan=plan,
        options=mosaic.Options(method=method, profiling=settings, progress=progress.follow("profiling the modules")),
    )
    loop = Loop(workload)
    _decide(handle, loop, progress)
    per_round = max(1, round(steps / _ROUNDS))
    retries = Retries(settings, handle.plan.device)
    progress.phase("training plain and colocated in turn", total=_ROUNDS)
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child("mosaic.cli.run.plain_loop", where, passive=passive)) for passive in (False, True)
        ]

        def one_round(steps: int) -> list[list[float]]:
            runs = {name: partial(child.ask, {"steps": steps}) for name, child in zip(WAITING, children, strict=True)}
            turns = take_turns({**runs, "colocated": partial(loop.steps, steps)}, 1)
            return [list(chain(*rounds)) for rounds in turns.values()]

        one_round(_WARM_STEPS)
        rounds = []
        for _ in range(_ROUNDS):
            rounds.append(retries.quietest(lambda: one_round(per_round))[0])
            progress.advance()
    *plain, ours = (list(chain(*samples)) for samples in zip(*rounds, strict=True))
    faster = faster_of(plain)
    note = retries.note
    metrics = handle.metrics()
    if output is not None:
        _leave_pictures(handle, output, note)
    measured = MeasuredInTurn(
        description=handle.describe(),
        active=handle.active,
        step_ms_plain=statistics.median(plain[faster]),
        plain_waiting=WAITING[faster],
        step_ms_colocated=statistics.median(ours),
        speedup=statistics.median(plain[faster]) / statistics.median(ours) if handle.active else None,
        overlap=metrics["overlap"],
        metrics=metrics,
        foreign_cpu_share=retries.taken.share,
        note=note,
    )
    handle.remove()
    return measured


def _decide(handle: mosaic.Handle, loop: Loop, progress: Progress) -> None:
    """Takes the steps of the trial, untimed."""
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


def _leave_pictures(handle: mosaic.Handle, output: Path, note: str) -> None:
    from mosaic.report.timeline import draw_timelines
    from mosaic.report.trace import write_trace

    timeline = handle.timeline()
    draw_timelines([timeline], output / "timeline.png", plan=handle.plan, subtitle=note)
    write_trace([timeline], output / "trace.json")
