"""One model's loop with the default line, from its first step on, against the plain loops of two copies of it.

The plain loop takes its steps before the trial, right after it, and then in turn with ours: not within it, since a
trial times the loop from step to step. The second plain loop shows how far two equal loops are apart here.
"""

from __future__ import annotations

import copy
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import mosaic
from bench.colocate.models import Loop, Workload
from bench.record import Figure, median_figure, missing_figure, one_line
from mosaic.engine import Handle
from mosaic.microbench import Budget
from mosaic.plan import Plan
from mosaic.profiler import ForeignLoad
from mosaic.take_turns import TrialSettings, take_turns

AGAIN = "plain step over another plain loop's, ratio"
BLOCK_MS = 150.0
"""How long each loop runs before it is another's turn."""
MIN_ROUNDS = 3
RATIO = "plain step over the step with Mosaic, after its trial, ratio"
PLAIN_MS = "plain step, ms"
LOST_MS = "lost by the trial, ms"
LOST_STEPS = "lost by the trial, in plain steps"
REPAID = "steps that repay the trial"
ALL_REPAID = "steps that repay the trial, finding, profiling and solving"
PLAIN_STEPS = 10
"""Before the trial, and as many after it."""


def measure(
    name: str, make: Callable[[], Workload], *, rounds: int, seconds: float, options: mosaic.Options | None = None
) -> Iterator[Figure]:
    """Colocates a model by the default line, lets the trial end, and takes steps in turn with the plain loop.

    Args:
        name: What figures call the model.
        make: Makes it.
        rounds: In which both loops take blocks of steps.
        seconds: After which no other round begins.
        options: Other options than the default line has, for machines that are too busy for it.
    """
    load, budget, work = ForeignLoad(), Budget(seconds), make()
    copies = [copy.deepcopy(work.model) for _ in range(3)]  # alike in memory, too, which the first model is not
    plain, again, ours = (Loop.of(model, work.batch, work.loss) for model in copies)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # nothing is known from earlier runs
        before = [plain.step_ms() for _ in range(PLAIN_STEPS + 1)][1:]
        began = time.perf_counter()
        more = {} if options is None else {"options": options}
        handle = mosaic.colocate(copies[-1], sample=work.batch, **more)
        ready_ms = 1e3 * (time.perf_counter() - began)
        trial = [ours.step_ms() for _ in _while_trying(handle)]
        around = before + [plain.step_ms() for _ in range(PLAIN_STEPS)]
        medians = in_turn((plain, again, ours), rounds, budget)
        labels = {"model": name, "runs": _running(handle), "decided": decided(handle)}
        handle.remove()
    labels["foreign CPU share"] = "unknown" if load.share is None else f"{load.share:.2f}"
    for figure in _figures(medians, ready_ms=ready_ms, trial=trial, around=around):
        yield replace(figure, name=f"{name}: {figure.name}", labels=labels)


def _while_trying(handle: Handle) -> Iterator[int]:
    for step in range(TrialSettings().max_steps + 1):
        if not handle.is_trying:
            return
        yield step


def in_turn(loops: Sequence[Loop], rounds: int, budget: Budget) -> list[list[float]]:
    """Lets loops take blocks of steps in turn; returns the median step of each block.

    There are fewer rounds where the budget ends first, but three at least.
    """
    steps = max(3, round(BLOCK_MS / min(loop.step_ms() for loop in loops)))
    numbers = itertools.count()
    samples = take_turns(
        {str(place): lambda loop=loop: [loop.step_ms() for _ in range(steps)] for place, loop in enumerate(loops)},
        rounds,
        more=lambda: next(numbers) < MIN_ROUNDS or budget.left_s > 0,
    )
    return [list(map(statistics.median, blocks)) for blocks in samples.values()]


def _figures(
    medians: Sequence[Sequence[float]], *, ready_ms: float, trial: list[float], around: list[float]
) -> Iterator[Figure]:
    plain_ms, again_ms, ours_ms = medians
    gain = median_figure(RATIO, [plain / ours for plain, ours in zip(plain_ms, ours_ms, strict=True)])
    same = median_figure(AGAIN, [plain / again for plain, again in zip(plain_ms, again_ms, strict=True)])
    step_ms = statistics.median(around)
    lost_ms = sum(trial) - len(trial) * step_ms
    measured = {
        "finding, profiling and solving, ms": ready_ms,
        "steps of the trial": float(len(trial)),
        LOST_MS: lost_ms,
        LOST_STEPS: lost_ms / step_ms,
    }
    yield from (gain, same, median_figure(PLAIN_MS, plain_ms))
    yield from (Figure(name=name, source="measured", value=value) for name, value in measured.items())
    saved_ms = statistics.median(plain_ms) - statistics.median(ours_ms)
    for name, spent_ms in ((REPAID, lost_ms), (ALL_REPAID, ready_ms + lost_ms)):
        if gain.low is not None and gain.low > 1 and saved_ms > 0:
            yield Figure(name=name, source="measured", value=max(0.0, spent_ms) / saved_ms)
        else:
            yield missing_figure(name, "the step is not surely shorter, so nothing repays them")


def _running(handle: Handle) -> str:
    return shape_of(handle.plan) if handle.active else "the plain loop"


def shape_of(plan: Plan) -> str:
    """Says which modules share which stage, and on how many cores each."""
    stages = ("+".join(f"{placed.module}:{placed.quota}" for placed in stage.placements) for stage in plan.stages)
    return " | ".join(stages)


def decided(handle: Handle) -> str:
    """Returns why that runs: what ``describe()`` says last of a trial, or of there having been none."""
    said = [line for line in handle.describe().splitlines() if not line.startswith(("stage", "tried", "to know"))]
    trials = [line for line in said if line.startswith("trial")]
    return one_line((trials or said)[-1])
