"""Mosaic's own cost: of calls, and of steps.

``python -m bench.colocate [--quick] [--json FILE]``

Calls of empty modules; steps of the zoo's models under the sequential plan, which can gain nothing, against the plain
loop. What the trial in the first steps makes of a loop is ``bench.never_slower``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

import mosaic
from bench.harness import PartedStudy, StudyPart
from bench.loops import Loop, Workload, in_turn, ratios
from bench.record import Figure, median_figure
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.microbench import Budget
from mosaic.models import PAPER_MODELS, build, make_batch
from mosaic.plan import plan_from_quotas

CALLS = 10_000
"""Placed calls under the sequential plan; a tenth as many on lanes."""
BLOCK = 100


class Nothing(nn.Module):
    """One multiplication with a parameter, so that it has a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Pair(nn.Module):
    """Two of them; neither depends on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Nothing(), Nothing()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


class Chain(nn.Module):
    """Two modules, of which the result of one goes through a chain of small operations."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.left, self.right, self.length = nn.Linear(8, 8), nn.Linear(8, 8), length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.left(x)
        for _ in range(self.length):
            y = y * 1.5
        return y + self.right(x)


def _alone(calls: int) -> list[Figure]:
    """Measures one module after the other, each on all cores: the cost where nothing is gained."""
    model, x = Pair(), torch.ones(1)
    slots = HostBackend().device.num_slots
    placed: list[float] = []
    plain: list[float] = []
    with _colocated(model, x, [{"left": slots}, {"right": slots}]) as handle:
        for _ in range(max(1, calls // BLOCK)):
            placed += [_us(lambda: model.left(x)) for _ in range(BLOCK)]
            with handle.disabled():
                plain += [_us(lambda: model.left(x)) for _ in range(BLOCK)]
    extra = [ours - theirs for ours, theirs in zip(placed, plain, strict=True)]
    return [
        median_figure("plain call of an empty module, us", plain),
        median_figure("placed call of an empty module, sequential plan, us", placed),
        median_figure("placed call of an empty module, sequential plan, over a plain call, us", extra),
    ]


def _on_lanes(calls: int) -> list[Figure]:
    """Measures calls side by side: each goes to a lane's thread, and its result is waited for at the end."""
    model, x = Pair(), torch.ones(1)
    launched, waited = [], []
    with _colocated(model, x, [{"left": 1, "right": 1}]), torch.no_grad():
        for _ in range(20):
            model(x)
        for _ in range(calls):
            waited.append(_us(lambda: model(x)) / 2)
            launched.append(_us(lambda: model.left(x)))
            model(x)  # lets the lanes come to rest
    return [
        median_figure("placed call of an empty module on a lane, launched, us", launched),
        median_figure("placed call of an empty module on a lane, waited for, us", waited),
    ]


def _between(calls: int, length: int = 20) -> list[Figure]:
    model, x = Chain(length), torch.ones(4, 8)
    with _colocated(model, x, [{"left": 1, "right": 1}]):
        for _ in range(10):
            model(x)
        samples = [_us(lambda: model(x)) / length for _ in range(calls)]
    return [median_figure("operation between modules on a lane, us", samples)]


def _sequential(seconds: float, *, name: str, rounds: int) -> Iterator[Figure]:
    work = Workload(model=build(name, "tiny"), batch=make_batch(name, "tiny"))
    loops = {"ours": Loop(work.model, work), "plain": Loop(copy.deepcopy(work.model), work)}
    slots = torch.get_num_threads()
    stages = [{part: slots} for part in find_modules(work.model, work.batch).graph.topological_order()]
    with _colocated(work.model, work.batch, stages):
        for loop in loops.values():
            loop.step_ms()
        steps_ms = in_turn(loops, rounds, Budget(seconds))
    yield median_figure(f"{name}, tiny: plain step, ms", steps_ms["plain"])
    yield median_figure(
        f"{name}, tiny: step under the sequential plan over the plain step, ratio",
        ratios(steps_ms["ours"], steps_ms["plain"]),
    )


@contextmanager
def _colocated(model: nn.Module, sample: object, stages: Sequence[dict[str, int]]) -> Iterator[mosaic.Handle]:
    backend = HostBackend(max(sum(stage.values()) for stage in stages))
    plan = plan_from_quotas(stages, graph=find_modules(model, sample).graph, device=backend.device)
    restore = partial(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(backend.device.num_slots)
    handle = mosaic.colocate(model, sample=sample, plan=plan, backend=backend)
    try:
        yield handle
    finally:
        handle.remove()
        restore()


def _us(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def _calls(_: float, *, calls: int) -> Iterator[Figure]:
    yield from (*_alone(calls), *_on_lanes(max(50, calls // 10)), *_between(max(50, calls // 200)))


def parts(*, calls: int, rounds: int, seconds: float) -> tuple[StudyPart, ...]:
    """Returns the parts of a study whose models have so many seconds each."""
    models = (
        StudyPart(name=name, make=partial(_sequential, name=name, rounds=rounds), seconds=seconds)
        for name in PAPER_MODELS
    )
    return (StudyPart(name="calls", make=partial(_calls, calls=calls), seconds=60.0), *models)


STUDY = PartedStudy(
    name="bench_colocate",
    quick=lambda: parts(calls=CALLS, rounds=6, seconds=6.0),
    quick_seconds=60.0,
    full=lambda: parts(calls=CALLS, rounds=30, seconds=300.0),
)

if __name__ == "__main__":
    STUDY.main(__doc__, "few rounds; within a minute on two cores")
