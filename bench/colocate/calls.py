"""The cost of a placed call, and an operation between modules: of modules that do next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

import mosaic
from bench.record import Figure, median_figure
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.plan import plan_from_quotas

if TYPE_CHECKING:
    from collections.abc import Iterator

ALONE = "placed call of an empty module, sequential plan, over a plain call, us"
"""The figure that has a goal: 20 us."""
GOAL_US = 20.0
_BLOCK = 100


class Nothing(nn.Module):
    """As good as empty: one multiplication with a parameter, so that it has a backward."""

    def __init__(self) -> None:
        """Makes the parameter."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies."""
        return x * self.weight


class Pair(nn.Module):
    """Two of them; neither depends on the other."""

    def __init__(self) -> None:
        """Makes both."""
        super().__init__()
        self.left = Nothing()
        self.right = Nothing()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Calls both."""
        return self.left(x), self.right(x)


class Chain(nn.Module):
    """A module whose result goes through a chain of small operations."""

    def __init__(self, length: int) -> None:
        """Makes the chain."""
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Calls both modules and follows one of them."""
        y = self.left(x)
        for _ in range(self.length):
            y = y * 1.5
        return y + self.right(x)


def measure_calls(calls: int) -> list[Figure]:
    """Measures ``calls`` placed calls under the sequential plan, and a tenth as many on lanes."""
    return [*_alone(calls), *_on_lanes(max(50, calls // 10)), *_between(max(50, calls // 200))]


def _alone(calls: int) -> list[Figure]:
    """One module after the other, each on all cores: what Mosaic costs where it gains nothing."""
    model, x = Pair(), torch.ones(1)
    slots = HostBackend().device.num_slots
    with _colocated(model, x, [{"left": slots}, {"right": slots}]) as handle:
        placed, plain = _in_turn(lambda: model.left(x), calls, handle.disabled)
    extra = [ours - theirs for ours, theirs in zip(placed, plain, strict=True)]
    return [
        median_figure("plain call of an empty module, us", plain),
        median_figure("placed call of an empty module, sequential plan, us", placed),
        median_figure(ALONE, extra),
    ]


def _on_lanes(calls: int) -> list[Figure]:
    """Side by side: a call is handed to a lane's thread, and its result is waited for at the end."""
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


@contextmanager
def _colocated(model: nn.Module, x: torch.Tensor, stages: Sequence[dict[str, int]]) -> Iterator[mosaic.Handle]:
    backend = HostBackend(max(sum(stage.values()) for stage in stages))
    plan = plan_from_quotas(stages, graph=find_modules(model, x).graph, device=backend.device)
    before = torch.get_num_threads()
    torch.set_num_threads(backend.device.num_slots)
    handle = mosaic.colocate(model, sample=x, plan=plan, backend=backend)
    try:
        yield handle
    finally:
        handle.remove()
        torch.set_num_threads(before)


def _in_turn(
    call: Callable[[], object], calls: int, plainly: Callable[[], AbstractContextManager[None]]
) -> tuple[list[float], list[float]]:
    """Measures blocks of calls, placed and plain in turn, so that a drift of the machine hits both."""
    placed: list[float] = []
    plain: list[float] = []
    for _ in range(max(1, calls // _BLOCK)):
        placed += [_us(call) for _ in range(_BLOCK)]
        with plainly():
            plain += [_us(call) for _ in range(_BLOCK)]
    return placed, plain


def _us(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3
