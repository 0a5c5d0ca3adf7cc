"""Steps of eight models with ``mosaic.colocate`` and plain, the trial's choice, and the cost of the trial.

``python -m bench.never_slower [--quick] [--json FILE]``

Each model has its own process. Two plain loops run before the trial, right after it, and then in turn with the loop
with Mosaic, by blocks. They do not run during the trial, which times the loop from step to step. The second plain loop
shows the difference of two equal loops. A model is slower or faster if the whole 95 % interval of the ratio is below or
above 1. On a busy machine ``mosaic.colocate`` leaves the plain loop; each figure has the share of the CPU used by other
processes.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import mosaic
from bench.gpu.tables import number
from bench.harness import PartedStudy, StudyPart
from bench.loops import Loop, Workload, in_turn, ratios
from bench.pages import shown, source_of, table
from bench.record import Figure, Study, median_figure, missing_figure, one_line
from mosaic.demo.model import TriModal, contrastive_loss
from mosaic.engine import Handle
from mosaic.microbench import Budget
from mosaic.models import PAPER_MODELS, build, make_batch
from mosaic.profiler import ForeignLoad
from mosaic.take_turns import TrialSettings

RECURRENT = "two recurrent towers"
PART_S = 42.0
"""Time limit of a model."""
END_S = 8.0
PLAIN_STEPS = 10
"""Plain steps before the trial, and after it."""
RATIO = "plain step over the step with Mosaic, after its trial, ratio"
AGAIN = "plain step over another plain loop's, ratio"
PLAIN_MS = "plain step, ms"
LOST_MS = "lost by the trial, ms"
LOST_STEPS = "lost by the trial, in plain steps"
REPAID = "steps that repay the trial"


class Series(nn.Module):
    """A tower over a series; with one row each step is a matrix-vector product, which hardly uses a second thread."""

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(channels, hidden, batch_first=True)
        self.out = nn.Linear(hidden, classes)

    def forward(self, series: Tensor) -> Tensor:
        """Returns logits of ``series``, of shape (rows, steps, channels)."""
        logits: Tensor = self.out(self.recurrent(series)[0].mean(1))
        return logits


class Sensors(nn.Module):
    """Two series with a tower each; the sum of their logits classifies them."""

    def __init__(self) -> None:
        super().__init__()
        self.lidar, self.radar = Series(16, 96, 8), Series(16, 96, 8)

    def forward(self, lidar: Tensor, radar: Tensor) -> Tensor:
        return self.lidar(lidar) + self.radar(radar)


def _zoo(name: str) -> Workload:
    return Workload(model=build(name, "tiny"), batch=make_batch(name, "tiny"))


def _demo(rows: int = 48) -> Workload:
    torch.manual_seed(0)
    batch = {
        "image": torch.rand(rows, 1, 8, 24),
        "audio": torch.randn(rows, 40, 96),
        "text": torch.randint(1, 29, (rows, 20)),
    }
    return Workload(model=TriModal(), batch=batch, loss=contrastive_loss)


def _towers(rows: int = 1, steps: int = 200) -> Workload:
    torch.manual_seed(0)
    batch: dict[str, Any] = {name: torch.randn(rows, steps, 16) for name in ("lidar", "radar")}
    target = torch.randint(0, 8, (rows,))
    return Workload(model=Sensors(), batch=batch, loss=lambda logits: nn.functional.cross_entropy(logits, target))


MODELS: Mapping[str, Callable[[], Workload]] = MappingProxyType(
    {
        RECURRENT: _towers,
        **{f"{name}-tiny": partial(_zoo, name) for name in PAPER_MODELS},
        "mosaic demo's": _demo,
    }
)
"""The paper's six models, the demo's, and two towers that run as fast on one core as on two."""


def measure(
    name: str, make: Callable[[], Workload], *, rounds: int, seconds: float, options: mosaic.Options | None = None
) -> Iterator[Figure]:
    """Colocates a model, completes the trial, and runs steps in turn with the plain loops.

    No round starts after ``seconds``. A busy machine needs other ``options``.
    """
    load, budget, work = ForeignLoad(), Budget(seconds), make()
    models = [copy.deepcopy(work.model) for _ in range(3)]  # the first model has another memory layout
    plain, again, ours = (Loop(model, work) for model in models)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # without results of earlier runs
        around = [plain.step_ms() for _ in range(PLAIN_STEPS + 1)][1:]
        began = time.perf_counter()
        more = {} if options is None else {"options": options}
        handle = mosaic.colocate(models[-1], sample=work.batch, **more)
        ready_ms = 1e3 * (time.perf_counter() - began)
        trial = [ours.step_ms() for _ in _while_trying(handle)]
        around += [plain.step_ms() for _ in range(PLAIN_STEPS)]
        blocks = in_turn({"plain": plain, "again": again, "ours": ours}, rounds, budget)
        labels = {"model": name, "runs": _running(handle), "decided": decided(handle)}
        handle.remove()
    labels["foreign CPU share"] = "unknown" if load.share is None else f"{load.share:.2f}"
    for figure in _figures(blocks, ready_ms=ready_ms, trial=trial, around=around):
        yield replace(figure, name=f"{name}: {figure.name}", labels=labels)


def _while_trying(handle: Handle) -> Iterator[int]:
    for step in range(TrialSettings().max_steps + 1):
        if not handle.is_trying:
            return
        yield step


def _figures(
    blocks: Mapping[str, list[float]], *, ready_ms: float, trial: list[float], around: list[float]
) -> Iterator[Figure]:
    gain = median_figure(RATIO, ratios(blocks["plain"], blocks["ours"]))
    step_ms = statistics.median(around)
    lost_ms = sum(trial) - len(trial) * step_ms
    measured = {
        "finding, profiling and solving, ms": ready_ms,
        "steps of the trial": float(len(trial)),
        LOST_MS: lost_ms,
        LOST_STEPS: lost_ms / step_ms,
    }
    yield gain
    yield median_figure(AGAIN, ratios(blocks["plain"], blocks["again"]))
    yield median_figure(PLAIN_MS, blocks["plain"])
    yield from (Figure(name=name, source="measured", value=value) for name, value in measured.items())
    saved_ms = statistics.median(blocks["plain"]) - statistics.median(blocks["ours"])
    if gain.low is not None and gain.low > 1 and saved_ms > 0:
        yield Figure(name=REPAID, source="measured", value=max(0.0, lost_ms) / saved_ms)
    else:
        yield missing_figure(REPAID, "the step is not surely shorter, so nothing repays it")


def _running(handle: Handle) -> str:
    """Returns the stages, with the cores of each module."""
    if not handle.active:
        return "the plain loop"
    stages = ("+".join(f"{p.module}:{p.quota}" for p in stage.placements) for stage in handle.plan.stages)
    return " | ".join(stages)


def decided(handle: Handle) -> str:
    """Returns the last line of ``describe()`` about a trial or its absence."""
    lines = [line for line in handle.describe().splitlines() if not line.startswith(("stage", "tried", "to know"))]
    trials = [line for line in lines if line.startswith("trial")]
    return one_line((trials or lines)[-1])


def parts(names: Sequence[str], *, rounds: int) -> tuple[StudyPart, ...]:
    return tuple(
        StudyPart.alone(name, PART_S, partial(measure, name, MODELS[name], rounds=rounds, seconds=PART_S - END_S))
        for name in names
    )


STUDY = PartedStudy(
    name="bench_never_slower",
    quick=lambda: parts(("clip-tiny", RECURRENT), rounds=4),
    quick_seconds=2 * PART_S,
    full=lambda: parts(tuple(MODELS), rounds=60),
    full_seconds=len(MODELS) * PART_S,
)


def never_slower_table(study: Study) -> str:
    """Returns a row per model of a study."""
    heads = ("plain step, ms", "plain step over ours", "two plain loops, likewise", "what ran after the trial")
    more = ("lost by the trial, ms", "in plain steps", "repaid after, steps", "CPU taken by others")
    rows = [_row(study, ratio) for ratio in study.figures if ratio.name.endswith(RATIO)]
    return table((source_of(study), *heads, *more), rows)


def _row(study: Study, ratio: Figure) -> tuple[str, ...]:
    model = ratio.labels["model"]
    own = {figure.name.removeprefix(f"{model}: "): figure for figure in study.figures}
    values = (own[name].value if name in own else None for name in (PLAIN_MS, LOST_MS, LOST_STEPS, REPAID))
    plain_ms, *numbers = map(number, values)
    intervals = (shown(ratio, 4), shown(own.get(AGAIN), 4))
    return (model, plain_ms, *intervals, ratio.labels["runs"], *numbers, ratio.labels["foreign CPU share"])


if __name__ == "__main__":
    for figure in STUDY.main(__doc__, "two models, few rounds; within a minute on two cores").figures:
        if figure.name.endswith(RATIO):
            print(f"{figure.labels['model']}: runs {figure.labels['runs']}; {figure.labels['decided']}")
