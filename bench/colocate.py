"""The cost of placed calls of empty modules: ``python -m bench.colocate [--quick] [--json FILE]``.

``bench.never_slower`` has the steps of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

import mosaic
from bench.harness import PartedStudy, StudyPart
from bench.record import Figure, median_figure
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.plan import plan_from_quotas

CALLS = 10_000
"""Number of placed calls with the sequential plan; a tenth of it on lanes."""
BLOCK = 100


class Nothing(nn.Module):
    """One multiplication by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Pair(nn.Module):
    """Two modules with a chain of small operations between them."""

    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self.left, self.right, self.length = Nothing(), Nothing(), length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.left(x)
        for _ in range(self.length):
            y = y * 1.5
        return y + self.right(x)


def alone(calls: int) -> Iterator[Figure]:
    """Measures modules one after the other, each on all cores: the overhead without a gain."""
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
    yield median_figure("placed call of an empty module, sequential plan, over a plain call, us", extra)


def on_lanes(calls: int) -> Iterator[Figure]:
    """Measures calls side by side on lanes; the caller waits for the results at the end."""
    model, x = Pair(), torch.ones(1)
    launched, waited = [], []
    with _colocated(model, x, [{"left": 1, "right": 1}]), torch.no_grad():
        for _ in range(20):
            model(x)
        for _ in range(calls):
            waited.append(_us(lambda: model(x)) / 2)
            launched.append(_us(lambda: model.left(x)))
            model(x)  # drains the lanes
    yield median_figure("placed call of an empty module on a lane, launched, us", launched)
    yield median_figure("placed call of an empty module on a lane, waited for, us", waited)


def between(calls: int, length: int = 20) -> Iterator[Figure]:
    model, x = Pair(length), torch.ones(1)
    with _colocated(model, x, [{"left": 1, "right": 1}]):
        for _ in range(10):
            model(x)
        yield median_figure(
            "operation between modules on a lane, us", [_us(lambda: model(x)) / length for _ in range(calls)]
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


def calls(count: int) -> Iterator[Figure]:
    yield from (*alone(count), *on_lanes(max(50, count // 10)), *between(max(50, count // 200)))


STUDY = PartedStudy(
    name="bench_colocate",
    quick=lambda: (StudyPart.alone("calls", 60.0, lambda: calls(CALLS // 10)),),
    quick_seconds=60.0,
    full=lambda: (StudyPart.alone("calls", 120.0, lambda: calls(CALLS)),),
)

if __name__ == "__main__":
    STUDY.main(__doc__, "few calls; within a minute on two cores")
