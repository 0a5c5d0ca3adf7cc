"""A day's samples by position, and this rank's part of each global batch; workers that may die read it ahead.

The samples are the same on any number of ranks and workers.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from mosaic.errors import MosaicError
from mosaic.retrain.worker.positions import PositionStream, generators_of, put_back, sample_words, seed_sample
from mosaic.retrain.workers import end_with

_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""Cores of this process at its start."""
_DYING_S = 0.5
"""Seconds for a worker to exit after its connections close."""
MAX_ATTEMPTS = 16
"""Rows of the same source that replace an unreadable row, at most."""
MIN_JUDGED = 1000
"""Least number of samples that the share of rejected rows is computed over."""
_MAX_DETAIL = 300
"""Most characters of an error's message."""
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """An unreadable row; another row of the same source took its position."""

    position: int
    source: str
    row: int
    reason: str
    """Kind of the error; rejected rows are counted by it."""
    detail: str

    def __str__(self) -> str:
        return f"row {self.row} of {self.source!r}: {self.reason}: {self.detail}"


class Samples(Dataset[Any]):
    """Samples of users' data sets by position; the seed and the position seed each one."""

    def __init__(self, datasets: Sequence[Dataset[Any]], stream: PositionStream) -> None:
        self.datasets = tuple(datasets)
        self.stream = stream
        self._generators = tuple(generators_of(dataset) for dataset in self.datasets)

    def __getitems__(self, positions: range) -> tuple[list[Any], tuple[Reject, ...]]:
        """Returns the samples of a micro-batch, and its unreadable rows that were replaced; torch's loader calls it."""
        part = slice(positions.start, positions.stop)
        sources, rows = self.stream.source[part].tolist(), self.stream.row[part].tolist()
        words = sample_words(self.stream.seed, positions).tolist()
        samples: list[Any] = []
        rejects: list[Reject] = []
        with put_back(tuple({id(own): own for each in set(sources) for own in self._generators[each]}.values())):
            for position, source, row, seeds in zip(positions, sources, rows, words, strict=True):
                samples.append(self._read(position, source, row, seeds, rejects))
        return samples, tuple(rejects)

    def _read(self, position: int, source: int, row: int, words: list[int], rejects: list[Reject]) -> Any:
        """Reads a row, again after an ``OSError``; then other rows of its source."""
        name, others, is_again = self.stream.sources[source].name, random.Random(words[3]), False
        for _ in range(MAX_ATTEMPTS + 1):
            try:
                seed_sample(words, self._generators[source])
                return self.datasets[source][row]
            except (MemoryError, MosaicError):
                raise
            except Exception as error:  # of any kind, from the user's data set: another row takes its place
                is_again = isinstance(error, OSError) and not is_again
                if not is_again:
                    kind, detail = type(error).__name__, str(error)[:_MAX_DETAIL]
                    rejects.append(Reject(position=position, source=name, row=row, reason=kind, detail=detail))
                    row = others.randrange(self.stream.sources[source].rows)
        raise MosaicError(
            f"position {position} read no row in {MAX_ATTEMPTS + 1} attempts, the last of them {rejects[-1]}. Check "
            "that source, or remove it from the day"
        )


class RejectCount:
    """Unreadable rows so far, by source and reason; ``limit`` is the share of samples beyond which ``add`` raises."""

    def __init__(self, limit: float = 0.01) -> None:
        self.limit = limit
        self.samples = 0
        self.by_source: dict[str, dict[str, int]] = {}

    def add(self, rejects: Sequence[Reject], samples: int) -> None:
        """Counts the rejects of a step; raises MosaicError if there are more than the limit allows."""
        self.samples += samples
        for reject in rejects:
            reasons = self.by_source.setdefault(reject.source, {})
            reasons[reject.reason] = reasons.get(reject.reason, 0) + 1
        total = sum(sum(reasons.values()) for reasons in self.by_source.values())
        judged = max(self.samples, MIN_JUDGED)
        if rejects and total > self.limit * judged:
            raise MosaicError(
                f"{total} of {self.samples} samples drew a row that is unreadable, more than {self.limit:.3g} of "
                f"{judged}: {self.by_source}; the last is {rejects[-1]}. Mend or remove such rows, or raise "
                "max_unreadable in [check], which is half of this limit"
            )

    def resume(self, samples: int, by_source: Mapping[str, Mapping[str, int]]) -> None:
        self.samples = samples
        self.by_source = {source: dict(reasons) for source, reasons in by_source.items()}


@dataclass(frozen=True, kw_only=True)
class BatchCut:
    """The cut of a global batch over ranks and micro-batches: nearly equal parts, the larger ones first."""

    batch: int
    """Samples of a step, over all ranks."""
    num_ranks: int = 1
    rank: int = 0
    micro_batches: int = 1
    """Parts of the global batch, rounded up to a multiple of the ranks."""

    @property
    def _count(self) -> int:
        return -(-self.micro_batches // self.num_ranks) * self.num_ranks

    @property
    def own(self) -> range:
        """Indices of this rank's micro-batches."""
        count = self._count // self.num_ranks
        return range(self.rank * count, (self.rank + 1) * count)

    def positions(self, step: int, index: int) -> range:
        size, more = divmod(self.batch, self._count)
        first = step * self.batch + index * size + min(index, more)
        return range(first, first + size + (index < more))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one forward and backward."""

    index: int
    """Index in the global batch; seeds random numbers."""
    weight: float
    """Its rows over those of the global batch: mean losses times this weight add up to the global mean."""
    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    micro_batches: tuple[MicroBatch, ...]
    rejects: tuple[Reject, ...] = ()


class LoaderDiedError(MosaicError):
    """A worker of the loader was killed; a restart may help."""


class BatchLoader(Iterator[StepBatch]):
    """Yields this rank's part of each step's global batch; as a context it closes its workers.

    The workers start here, not at the first batch; construct the loader before you restore random states. It draws no
    random numbers. Workers have a process group of their own, so a signal to the run's group does not end them before
    the step ends. They end with their parent process, even if it is killed.

    Raises:
        LoaderDiedError: A worker died; ``next`` raises it.
        MosaicError: More rows are unreadable than ``rejects`` allows.
    """

    def __init__(
        self,
        samples: Samples,
        cut: BatchCut,
        steps: range,
        *,
        workers: int = 0,
        collate: Collate | None = None,
        pin: bool = False,
        rejects: RejectCount,
    ) -> None:
        self.rejects = rejects
        self._cut, self._steps = cut, iter(steps)
        by_main_thread = threading.current_thread() is threading.main_thread()
        positions: Any = (cut.positions(step, index) for step in steps for index in cut.own)
        loader = DataLoader(
            samples,
            batch_sampler=positions,
            num_workers=workers,
            collate_fn=lambda drawn: ((collate or default_collate)(drawn[0]), drawn[1]),
            pin_memory=pin,
            worker_init_fn=partial(_begin_worker, os.getpid(), by_main_thread),
            generator=torch.Generator(),
        )
        before, handler = set(active_children()), signal.getsignal(signal.SIGCHLD)
        self._loaded: Iterator[tuple[Any, tuple[Reject, ...]]] = iter(loader)
        self._workers = tuple(set(active_children()) - before)
        if handler is not None and by_main_thread:
            # torch's handler raises anywhere in the loop; this loader reports a dead worker at the next batch instead.
            signal.signal(signal.SIGCHLD, handler)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    def __next__(self) -> StepBatch:
        step = next(self._steps)
        parts: list[MicroBatch] = []
        rejects: list[Reject] = []
        samples = 0
        for index in self._cut.own:
            count = len(self._cut.positions(step, index))
            data, rejected = self._read()
            parts.append(MicroBatch(index=index, weight=count / self._cut.batch, data=data))
            rejects += rejected
            samples += count
        self.rejects.add(rejects, samples)
        return StepBatch(micro_batches=tuple(parts), rejects=tuple(rejects))

    def _read(self) -> tuple[Any, tuple[Reject, ...]]:
        """Returns the next collated micro-batch, and its unreadable rows that were replaced."""
        try:
            return next(self._loaded)
        except MosaicError as error:  # of a worker: torch appends its traceback
            raise MosaicError(str(error).rpartition("MosaicError: ")[2].strip()) from error
        except (RuntimeError, OSError, EOFError) as error:  # torch's own, or a connection to a dead worker
            for worker in self._workers:
                with suppress(RuntimeError):  # torch's handler of SIGCHLD may report the same death in here
                    worker.join(_DYING_S)
            codes = {worker.pid: worker.exitcode for worker in self._workers if worker.exitcode}
            if not codes:
                raise
            ends = [f"process {pid}: {signal.Signals(-code).name if code < 0 else code}" for pid, code in codes.items()]
            raise LoaderDiedError(
                f"a worker of the loader ended early ({', '.join(ends)}). The kernel sends SIGKILL if "
                "memory is short: use fewer workers, or none. The run resumes from its last checkpoint"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # After an error, garbage collection would wait five seconds for each worker.
        getattr(self._loaded, "_shutdown_workers", lambda: None)()
        self._loaded, self._steps = iter(()), iter(())


def _begin_worker(parent: int, by_main_thread: bool, worker: int) -> None:
    os.setpgid(0, 0)
    if _CORES:  # the loop's thread may be pinned to some of them
        os.sched_setaffinity(0, _CORES)
    if sys.platform == "linux" and by_main_thread:
        # The kernel sends it when the thread that started this process ends, so other threads do not count.
        end_with(parent)
