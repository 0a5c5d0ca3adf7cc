"""Training a user's model plain and colocated in turn."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import mosaic
from mosaic.cli.workload import Workload
from mosaic.plan import Plan
from mosaic.profiler import ProfileSettings
from mosaic.report import Progress

_ROUNDS = 4
_WARM_STEPS = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """What was measured; both loops ran in this process, with passive OpenMP waiting."""

    description: str
    """What ran where, and what did not."""
    active: bool
    """Whether modules ran on lanes."""
    step_ms_plain: float
    """Median step of the plain loop."""
    step_ms_colocated: float
    """Median step of the colocated loop."""
    speedup: float
    """The first over the second."""
    overlap: float
    """Share of lane time with another lane busy."""
    metrics: dict[str, float]
    """Measured medians by module and phase."""

    def figures(self) -> dict[str, float | bool]:
        """Returns the numbers to print."""
        return {
            "active": self.active,
            "step_ms_plain": self.step_ms_plain,
            "step_ms_colocated": self.step_ms_colocated,
            "speedup": self.speedup,
            "overlap": self.overlap,
        }


def run_in_turn(
    workload: Workload,
    plan: Plan | None,
    steps: int,
    progress: Progress,
    *,
    settings: ProfileSettings,
    output: Path | None,
) -> Trial:
    """Takes ``steps`` training steps of each, in rounds, and returns what was measured.

    The optimizer is AdamW with a small learning rate; the model is changed.
    """
    handle = mosaic.colocate(
        workload.model,
        sample=workload.sample,
        plan=plan,
        settings=settings,
        progress=progress.follow("profiling the modules"),
    )
    parameters = [p for p in workload.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-5) if parameters else None
    per_round = max(1, round(steps / _ROUNDS))
    plain: list[float] = []
    ours: list[float] = []
    progress.phase("training plain and colocated in turn", total=2 * _ROUNDS)
    for round_index in range(_ROUNDS):
        extra = _WARM_STEPS if round_index == 0 else 0
        with handle.disabled():
            plain += _steps(workload, optimizer, per_round + extra)[extra:]
        progress.advance()
        ours += _steps(workload, optimizer, per_round + extra)[extra:]
        progress.advance()
    metrics = handle.metrics()
    if output is not None:
        _leave_pictures(handle, output)
    measured = Trial(
        description=handle.describe(),
        active=handle.active,
        step_ms_plain=statistics.median(plain),
        step_ms_colocated=statistics.median(ours),
        speedup=statistics.median(plain) / statistics.median(ours),
        overlap=metrics["overlap"],
        metrics=metrics,
    )
    handle.remove()
    return measured


def _steps(workload: Workload, optimizer: torch.optim.Optimizer | None, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        loss = workload.loss(workload.call())
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _leave_pictures(handle: mosaic.Handle, output: Path) -> None:
    from mosaic.report import draw_timelines, write_trace

    timeline = handle.timeline()
    draw_timelines([timeline], output / "timeline.png", plan=handle.plan)
    write_trace([timeline], output / "trace.json")
