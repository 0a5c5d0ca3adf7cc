"""What does Mosaic itself cost? A placed call of an empty module, and one operation between modules.

``python -m bench.bench_call [--quick] [--json FILE]``
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import mosaic
from bench.harness import Figure, Study, finish, in_turn, median_figure
from mosaic.backends.host import HostBackend
from mosaic.demo.equality import one_slot_plan
from mosaic.engine import find_modules
from mosaic.profiler import ForeignLoad


class Empty(nn.Module):
    """Two modules that do next to nothing, so that only the way to them takes time."""

    def __init__(self) -> None:
        """Makes both."""
        super().__init__()
        self.left = nn.Linear(1, 1)
        self.right = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Calls both; neither depends on the other."""
        return self.left(x), self.right(x)


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few calls; under a minute on two cores")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    study(calls=200 if given.quick else 1000, path=given.json)


def study(*, calls: int, path: Path | None) -> Study:
    """Measures and reports."""
    load = ForeignLoad()
    figures = [*_calls(calls), *_glue(max(50, calls // 20))]
    return finish("bench_call", figures, load, path)


def _side_by_side(model: nn.Module, x: torch.Tensor) -> mosaic.Handle:
    backend = HostBackend(max(2, HostBackend().device.num_slots))
    plan = one_slot_plan(find_modules(model, (x,)).graph, backend.device)
    return mosaic.colocate(model, sample=(x,), plan=plan, backend=backend)


def _calls(calls: int) -> list[Figure]:
    model, x = Empty(), torch.ones(1, 1)
    handle = _side_by_side(model, x)

    def placed() -> float:
        start = time.perf_counter()
        model(x)
        return (time.perf_counter() - start) * 1e6 / 2

    def plain() -> float:
        with handle.disabled():
            start = time.perf_counter()
            model(x)
            return (time.perf_counter() - start) * 1e6 / 2

    in_turn(plain, placed, 20)
    plain_us, placed_us = in_turn(plain, placed, calls)
    handle.remove()
    extra = [ours - theirs for ours, theirs in zip(placed_us, plain_us, strict=True)]
    return [
        median_figure("plain call of an empty module, us", plain_us),
        median_figure("placed call of an empty module, waited for, us", placed_us),
        median_figure("what placing adds to a call, us", extra),
    ]


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


def _glue(calls: int, length: int = 20) -> list[Figure]:
    model, x = Chain(length), torch.ones(4, 8)
    handle = _side_by_side(model, x)

    def placed() -> float:
        start = time.perf_counter()
        model(x)
        return (time.perf_counter() - start) * 1e6 / length

    in_turn(placed, placed, 10)
    samples, _ = in_turn(placed, placed, calls)
    handle.remove()
    return [median_figure("an operation that follows its branch, us (its share of two calls included)", samples)]


if __name__ == "__main__":
    main()
