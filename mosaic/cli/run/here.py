"""Training a user's model plain and colocated in turn."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import mosaic
from mosaic.child import Child
from mosaic.cli.workload import Loop, Workload
from mosaic.plan import Plan
from mosaic.profiler import ProfileSettings
from mosaic.report.progress import Progress

_ROUNDS = 4
_WARM_STEPS = 2
_STEPS_BEFORE = 10
"""Steps before a loop without an optimizer is known for one, and its trial begins."""


@dataclass(frozen=True, slots=True)
class MeasuredInTurn:
    """What was measured."""

    description: str
    """What ran where, and what did not."""
    active: bool
    """Whether modules ran on lanes."""
    step_ms_plain: float
    """Median step of the plain loop at its best: a process of its own, all cores, torch's own threads and waiting."""
    step_ms_colocated: float
    """Median step of the colocated loop."""
    speedup: float | None
    """The first over the second; None where nothing was colocated, since both are then the plain loop."""
    overlap: float
    """Share of lane time with another lane busy."""
    metrics: dict[str, float]
    """Measured medians by module and phase."""

    def figures(self) -> dict[str, float | bool | str]:
        """Returns what to print."""
        return {
            "active": self.active,
            "step_ms_plain": self.step_ms_plain,
            "step_ms_colocated": self.step_ms_colocated,
            "speedup": "none: the model runs as it was" if self.speedup is None else self.speedup,
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
    """Takes ``steps`` training steps of each, in rounds, and returns what was measured.

    Without a plan Mosaic solves for one and tries it first, as it does in anybody's loop; the steps counted here come
    after that. The plain loop has a process of its own and is at its best there. The model is changed.
    """
    handle = mosaic.colocate(
        workload.model,
        sample=workload.sample,
        plan=plan,
        options=mosaic.Options(
            method=method, profiling=settings, if_busy="raise", progress=progress.follow("profiling the modules")
        ),
    )
    loop = Loop(workload)
    _decide(handle, loop, progress)
    per_round = max(1, round(steps / _ROUNDS))
    plain: list[float] = []
    ours: list[float] = []
    progress.phase("training plain and colocated in turn", total=_ROUNDS)
    with Child("mosaic.cli.run.plain_loop", where) as plain_loop:
        plain_loop.ask({"steps": _WARM_STEPS})
        loop.steps(_WARM_STEPS)
        for _ in range(_ROUNDS):
            plain += plain_loop.ask({"steps": per_round})
            ours += loop.steps(per_round)
            progress.advance()
    metrics = handle.metrics()
    if output is not None:
        _leave_pictures(handle, output)
    measured = MeasuredInTurn(
        description=handle.describe(),
        active=handle.active,
        step_ms_plain=statistics.median(plain),
        step_ms_colocated=statistics.median(ours),
        speedup=statistics.median(plain) / statistics.median(ours) if handle.active else None,
        overlap=metrics["overlap"],
        metrics=metrics,
    )
    handle.remove()
    return measured


def _decide(handle: mosaic.Handle, loop: Loop, progress: Progress) -> None:
    """Takes the steps in which plans are tried, where they are; they are not timed here."""
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


def _leave_pictures(handle: mosaic.Handle, output: Path) -> None:
    from mosaic.report.timeline import draw_timelines
    from mosaic.report.trace import write_trace

    timeline = handle.timeline()
    draw_timelines([timeline], output / "timeline.png", plan=handle.plan)
    write_trace([timeline], output / "trace.json")
