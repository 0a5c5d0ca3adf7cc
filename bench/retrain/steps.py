"""Steps of a day's loop against those of a bare one: the same model, optimizer and rows, a loader of torch, no Mosaic.

Both take blocks of steps in turn, in one process. The day's loop runs as it does at night; where it asks for the batch
that begins a block, the bare loop takes a block first. So a drift of the machine hits both, and all that the day's loop
does beside its steps counts: random numbers, signals, the log, checkpoints and the thread that writes them.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from bench.record import Figure, median_figure
from bench.retrain.encoders import PROGRAM
from mosaic.checkpoint.methods import KeptModel
from mosaic.train.crew import Crew
from mosaic.train.data.loader import BatchCut, BatchLoader, StepBatch, StepLoader
from mosaic.train.data.positions import PositionStream, Source
from mosaic.train.data.samples import RejectCount, Samples
from mosaic.train.environment import use_repeatable_kernels
from mosaic.train.loop import Loop, LoopSettings, Trainee
from mosaic.train.records import DayNotes
from mosaic.train.signals import StopRequests

STEP_MS = 50.0
"""What a step should take; it has so many rows."""
BLOCK = 20
"""Steps of a block; a checkpoint is on the disk before it ends."""
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
_CPU = torch.device("cpu")


RATIO = "{workers} workers: steps of a day over the bare loop's, ratio (goal: 1.02)"
LOST = "{workers} workers: a checkpoint of 57 MB costs its loop in all, its writing beside the steps included, ms"


def steps(*, workers: int, rounds: int, block: int = BLOCK, rows: int | None = None) -> Iterator[Figure]:
    """Measures blocks of steps; a checkpoint is saved in every third one of the day's loop.

    Args:
        workers: Processes that load, of either loop.
        rounds: Blocks of each loop; the first ones are not counted.
        block: Steps of a block.
        rows: Of a step; as many as take ``STEP_MS`` where None.
    """
    rows = rows or _rows_of_a_step()
    with tempfile.TemporaryDirectory() as folder:
        turns = _in_turn(Path(folder), workers=workers, rounds=rounds, block=block, rows=rows)
    yield median_figure(f"{workers} workers: step of the bare loop, ms", [1e3 * s / block for s in turns.bare_s])
    pairs = tuple(zip(turns.ours_s, turns.bare_s, turns.saves, strict=True))
    if ratios := [ours / bare for ours, bare, saves in pairs if not saves]:
        yield median_figure(RATIO.format(workers=workers), ratios)
    if lost := [1e3 * (ours - bare) / saves for ours, bare, saves in pairs if saves]:
        yield median_figure(LOST.format(workers=workers), lost)
        yield median_figure(f"{workers} workers: of which the loop waits for, ms", turns.stalls_ms)


class Bare:
    """The loop that a user would write."""

    def __init__(self, model: nn.Module, rows: int, workers: int) -> None:
        self._model = model.train()
        (self._optimizer,), (self._scheduler,) = PROGRAM.optimizers(model, 1 << 16)
        data = PROGRAM.make_dataset(Path(), True)
        self._batches = iter(DataLoader(data, batch_size=rows, shuffle=True, num_workers=workers))

    def take(self, count: int) -> float:
        """Takes steps, by whatever algorithms are fastest; returns the seconds."""
        torch.use_deterministic_algorithms(False)
        began = time.perf_counter()
        for _ in range(count):
            PROGRAM.loss(self._model, next(self._batches)).backward()
            self._optimizer.step()
            self._scheduler.step()
            self._optimizer.zero_grad()
        return time.perf_counter() - began


class _Keeper(KeptModel):
    """Notes how long each save holds the loop up."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.stalls_ms: list[float] = []

    def save(self, folder: str | Path, **what: Any) -> Path:
        """Saves."""
        began = time.perf_counter()
        path = super().save(folder, **what)
        self.stalls_ms.append(1e3 * (time.perf_counter() - began))
        return path


class _Turns(StepLoader):
    """Batches of a day's loop; the bare loop runs between its blocks.

    Attributes:
        bare_s: Seconds of the bare loop's blocks, but the first.
        ours_s: Those of the day's loop after them.
        saves: Checkpoints that were begun in the latter.
        stalls_ms: How long each held it up.
    """

    def __init__(self, batches: BatchLoader, bare: Bare, keeper: _Keeper, block: int) -> None:
        self.rejects = batches.rejects
        self.bare_s: list[float] = []
        self.ours_s: list[float] = []
        self.saves: list[int] = []
        self.stalls_ms = keeper.stalls_ms
        self._batches, self._bare, self._keeper, self._block = batches, bare, keeper, block
        self._steps, self._began, self._saved = 0, 0.0, 0

    def __next__(self) -> StepBatch:
        """Returns the next batch."""
        if self._steps % self._block == 0:
            self._end_block()
            self._keeper.finish_saving()  # nothing is written while the bare loop runs
            self.bare_s.append(self._bare.take(self._block))
            use_repeatable_kernels(_CPU)
            self._began, self._saved = time.perf_counter(), len(self.stalls_ms)
        self._steps += 1
        return next(self._batches)

    def _end_block(self) -> None:
        if self._steps:
            self.ours_s.append(time.perf_counter() - self._began)
            self.saves.append(len(self.stalls_ms) - self._saved)

    def without_the_first(self) -> _Turns:
        """Ends: what belongs to no whole round, and the first one, which is slower, is dropped."""
        del self.bare_s[len(self.ours_s) :]
        for each in (self.bare_s, self.ours_s, self.saves):
            del each[0]
        return self


def _rows_of_a_step() -> int:
    took = {}
    for rows in _ROWS:
        bare = Bare(PROGRAM.make_model(), rows, 0)
        bare.take(2)
        took[rows] = 1e3 * statistics.median(bare.take(1) for _ in range(5))
        if took[rows] > STEP_MS:
            break
    return min(took, key=lambda rows: abs(took[rows] - STEP_MS))


def _in_turn(folder: Path, *, workers: int, rounds: int, block: int, rows: int) -> _Turns:
    torch.manual_seed(0)
    model = PROGRAM.make_model()
    bare = Bare(copy.deepcopy(model), rows, workers)
    block_s = bare.take(block)
    optimizers, schedulers = PROGRAM.optimizers(model, 1 << 16)
    keeper = _Keeper(model)
    keeper.prepare_saving(optimizer=optimizers)
    last = rounds * block + 1
    settings = LoopSettings(
        seed=0,
        save_s=5.5 * block_s,  # while each loop takes three blocks
        keep=1,
        until=None,
        checkpoints=folder / "checkpoints",
        metrics=folder / "metrics.jsonl",
    )
    trainee = Trainee(
        model=model.train(), keeper=keeper, optimizers=optimizers, schedulers=schedulers, scaler=None, companions={}
    )
    notes = DayNotes(loaded="", rejects={})
    loop = Loop(PROGRAM, trainee, settings, Crew(_CPU), StopRequests(), step=0, notes=notes)
    cut, rejects = BatchCut(batch=rows), RejectCount()
    with BatchLoader(_samples(), cut, range(last), workers=workers, rejects=rejects) as batches:
        turns = _Turns(batches, bare, keeper, block)
        loop.run(turns, last)
    del turns.stalls_ms[-1]  # of the end, which waits
    return turns.without_the_first()


def _samples() -> Samples:
    """Returns rows of a new day and of replayed ones."""
    sets = {"new": Fraction(7, 10), "replay": Fraction(3, 10)}
    data = [PROGRAM.make_dataset(Path(), True) for _ in sets]
    sources = [Source(name=name, rows=len(data[0]), share=share, digest="") for name, share in sets.items()]
    return Samples(data, PositionStream(sources, seed=0))
