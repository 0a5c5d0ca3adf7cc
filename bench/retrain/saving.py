"""The cost of a checkpoint to its loop: how long ``save`` holds it up, and how fast steps are while it is written."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from bench.harness import in_turn
from bench.record import Figure, median_figure
from mosaic.checkpoint.methods import KeptModel

STALL = "save, weights of 100 MB with AdamW's 200 MB, holds the loop up for, ms"
"""The figure that has a goal."""
GOAL_MS = 50.0
_LAYERS, _WIDTH = 8, 512
"""Of transformer layers: 25 million parameters in 96 tensors."""
_NUMBERS = 75_000_000
"""Of its parameters and AdamW's state, about."""


class _Loop:
    """Steps of about 50 ms on two cores, and a model beside them whose checkpoints are written."""

    def __init__(self, folder: Path) -> None:
        layer = nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.kept = KeptModel(self.model)
        self.folder = folder
        self._matrix = torch.randn(1024, 1024)
        self._small = [torch.randn(64, 64) for _ in range(200)]

    def step(self) -> None:
        """Large operations, which are cores' work, and small ones, which are the interpreter's."""
        for _ in range(3):
            self._matrix @ self._matrix
        for each in self._small:
            (each @ each).relu_()

    def save(self, step: int) -> float:
        begin = time.perf_counter()
        self.kept.save(self.folder, step=step, optimizer=self.optimizer, keep=1)
        return 1e3 * (time.perf_counter() - begin)


def saving(folder: Path | None = None, *, rounds: int = 9, steps: int = 60) -> Iterator[Figure]:
    """Measures saves of a model of 100 MB.

    Args:
        folder: On the disk in question; the one of temporary files by default.
        rounds: Saves, and blocks of steps with and without one, in turn.
        steps: Of a block; a checkpoint is on the disk before it ends.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        loop = _Loop(Path(place))
        begin = time.perf_counter()
        loop.kept.prepare_saving(optimizer=loop.optimizer)
        yield median_figure("room for copies is made before the first step, ms", [1e3 * (time.perf_counter() - begin)])
        yield median_figure("the first save holds the loop up for, ms", [loop.save(0)])
        loop.kept.finish_saving()
        source, room = torch.randn(_NUMBERS), torch.zeros(_NUMBERS)
        cpu_ms: list[float] = []
        stalls, copies = in_turn(
            lambda: _save_alone(loop, cpu_ms), lambda: 1e3 * _seconds(lambda: room.copy_(source)), rounds
        )
        yield median_figure(STALL, stalls)
        ratio = [stall / copy for stall, copy in zip(stalls, copies, strict=True)]
        yield median_figure("the same over a plain copy of as many bytes, ratio", ratio)
        yield median_figure("a save takes of the cores, in all, CPU ms", cpu_ms)
        with_save, without = in_turn(lambda: _block(loop, steps, save=True), lambda: _block(loop, steps), rounds)
        ratio = [one / other for one, other in zip(with_save, without, strict=True)]
        yield median_figure(f"{steps} steps with a save over {steps} without, ratio", ratio)
        digests = [1e3 * _seconds(loop.kept.digest) for _ in range(rounds)]
        yield median_figure("digest of 100 MB of parameters, ms", digests)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _save_alone(loop: _Loop, cpu_ms: list[float]) -> float:
    """Saves with no steps beside it; returns for how long the loop was held up, in ms, and adds the cores' time."""
    begin = time.process_time()
    stall = loop.save(0)
    loop.kept.finish_saving()
    cpu_ms.append(1e3 * (time.process_time() - begin))
    return stall


def _block(loop: _Loop, steps: int, *, save: bool = False) -> float:
    """Returns the seconds of a block of steps, with a save in front of them if it is asked for."""
    begin = time.perf_counter()
    if save:
        loop.save(0)
    for _ in range(steps):
        loop.step()
    seconds = time.perf_counter() - begin
    loop.kept.finish_saving()
    return seconds
