"""This rank's part of each global batch, in micro-batches, read ahead by workers that may be killed at any time."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import active_children
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, default_collate

from mosaic.errors import MosaicError
from mosaic.train.data.samples import Drawn, Reject, RejectCount, Samples

_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""Cores of this process as it began."""
_PR_SET_PDEATHSIG = 1
"""Of ``prctl``: which signal a process gets when the one that made it ends."""
_DYING_S = 0.5
"""How long a worker may take to end after its connections have."""

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class BatchCut:
    """How a global batch is cut over ranks and micro-batches: parts as equal as can be, the larger ones first.

    Raises:
        ValueError: There is no such rank, or a micro-batch would have no row.
    """

    batch: int
    """Samples of a step, over all ranks."""
    num_ranks: int = 1
    """Processes that train."""
    rank: int = 0
    """This one."""
    micro_batches: int = 1
    """Parts of the global batch; each rank takes as many, so that it is rounded up to a multiple of the ranks."""
    exact: bool = False
    """Whether not to round: for equal bits the parts are the same on any number of ranks."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks or self.micro_batches < 1:
            raise ValueError(
                f"rank={self.rank}, num_ranks={self.num_ranks}, micro_batches={self.micro_batches}; ranks count from "
                "0, and there is a micro-batch or more"
            )
        if self.exact and self.micro_batches % self.num_ranks:
            raise ValueError(
                f"micro_batches={self.micro_batches} on {self.num_ranks} ranks; for equal bits take a multiple of "
                f"every number of ranks that will train, such as {self._rounded}"
            )
        if self.batch < self._rounded:
            raise ValueError(
                f"batch={self.batch} is cut into {self._rounded} micro-batches on {self.num_ranks} ranks; take a batch "
                f"of {self._rounded} or more, or fewer ranks"
            )

    @property
    def _rounded(self) -> int:
        return -(-self.micro_batches // self.num_ranks) * self.num_ranks

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Samples of each micro-batch of the global batch."""
        each, more = divmod(self.batch, self._rounded)
        return tuple(each + (index < more) for index in range(self._rounded))

    @property
    def own(self) -> range:
        """Micro-batches of this rank."""
        each = self._rounded // self.num_ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def positions(self, step: int, microbatch: int) -> range:
        """Returns the positions of a micro-batch of the global batch."""
        first = step * self.batch + sum(self.rows[:microbatch])
        return range(first, first + self.rows[microbatch])


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward and backward is done on."""

    index: int
    """Among the micro-batches of the global batch; random numbers are seeded by it."""
    rows: int
    """Samples that it has."""
    weight: float
    """``rows`` over those of the global batch: losses that are means, times this, add up to the global mean."""
    data: Any
    """Its samples, collated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """This rank's part of a global batch."""

    step: int
    """Index of the optimizer step."""
    micro_batches: tuple[MicroBatch, ...]
    """In order."""
    rejects: tuple[Reject, ...]
    """Rows that could not be read on the way."""


class LoaderDiedError(MosaicError):
    """A worker that loads data was killed; another start may help."""


class StepLoader(Iterator[StepBatch]):
    """Goes through the steps of a run once; a context that ends what loads the data."""

    rejects: RejectCount
    """Rows that could not be read so far."""

    def state_dict(self) -> dict[str, Any] | None:
        """Returns what going on after the steps yielded so far needs beside their number; None for nothing."""
        return None

    def close(self) -> None:
        """Ends what loads the data."""

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends what loads the data."""
        self.close()


class BatchLoader(StepLoader):
    """Yields this rank's part of each global batch; the same whatever the number of workers.

    Workers are started here and not at the first batch: make the loader before random states are restored. It takes no
    random numbers. Workers are in a process group of their own, so that a signal to the run's does not end them before
    the step is finished, and end with the process that made them, also when it is killed.

    Args:
        samples: By position.
        cut: How a global batch is cut.
        steps: To yield; a run that goes on begins after those taken.
        workers: Processes that load; 0 loads in this one.
        collate: Makes a batch of a list of samples; torch's own by default.
        pin: Whether to copy into pinned memory, for CUDA.
        rejects: Where unreadable rows are counted, and how many may be.
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
        rejects: RejectCount | None = None,
    ) -> None:
        self.cut = cut
        self.rejects = rejects or RejectCount()
        self._steps = iter(steps)
        loader = DataLoader(
            samples,
            batch_sampler=_Microbatches(cut, steps),  # type: ignore[arg-type]  # of ranges
            num_workers=workers,
            collate_fn=partial(_collated, collate or default_collate),
            pin_memory=pin,
            worker_init_fn=partial(_begin_worker, os.getpid(), threading.current_thread() is threading.main_thread()),
            generator=torch.Generator(),
        )
        before, handler = set(active_children()), signal.getsignal(signal.SIGCHLD)
        self._loaded: Iterator[tuple[Any, tuple[Reject, ...]]] = iter(loader)
        self._workers = tuple(set(active_children()) - before)
        if handler is not None and threading.current_thread() is threading.main_thread():
            # torch's own raises wherever the loop is; a dead worker is reported here, at the next batch, instead.
            signal.signal(signal.SIGCHLD, handler)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Processes of the workers."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    def __next__(self) -> StepBatch:
        """Returns the next step's batch.

        Raises:
            LoaderDiedError: A worker died.
            MosaicError: More rows cannot be read than the limit allows.
        """
        step = next(self._steps)
        parts: list[MicroBatch] = []
        rejects: list[Reject] = []
        for index in self.cut.own:
            data, rejected = self._load()
            rows = self.cut.rows[index]
            parts.append(MicroBatch(index=index, rows=rows, weight=rows / self.cut.batch, data=data))
            rejects.extend(rejected)
        self.rejects.add(rejects, sum(part.rows for part in parts))
        return StepBatch(step=step, micro_batches=tuple(parts), rejects=tuple(rejects))

    def _load(self) -> tuple[Any, tuple[Reject, ...]]:
        try:
            data, rejects = next(self._loaded)
        except MosaicError as error:  # of a worker: torch adds a page of where it was raised
            raise MosaicError(str(error).rpartition("MosaicError: ")[2].strip()) from error
        except (RuntimeError, OSError, EOFError) as error:  # torch's own, or a connection to one that is gone
            for worker in self._workers:
                worker.join(_DYING_S)
            dead = [worker for worker in self._workers if worker.exitcode]
            if not dead:
                raise
            ends = ", ".join(f"process {worker.pid}: {_how_it_ended(worker.exitcode or 0)}" for worker in dead)
            raise LoaderDiedError(
                f"a worker that loads data ended before its time ({ends}). SIGKILL is what the kernel sends where "
                "memory is short: take fewer workers, or none. The run goes on from its last checkpoint"
            ) from error
        return data, rejects

    def close(self) -> None:
        """Ends the workers; those that are at a sample finish it."""
        # Left to the garbage collector, after an error, each worker would be waited for in vain, for five seconds.
        getattr(self._loaded, "_shutdown_workers", lambda: None)()
        self._loaded, self._steps = iter(()), iter(())


@dataclass(frozen=True)
class _Microbatches:
    """Positions of this rank's micro-batches, in order."""

    cut: BatchCut
    steps: range

    def __iter__(self) -> Iterator[range]:
        return (self.cut.positions(step, index) for step in self.steps for index in self.cut.own)

    def __len__(self) -> int:
        return len(self.steps) * len(self.cut.own)


def _collated(collate: Collate, drawn: Drawn) -> tuple[Any, tuple[Reject, ...]]:
    return collate(drawn.samples), drawn.rejects


def _begin_worker(parent: int, by_main_thread: bool, worker: int) -> None:
    os.setpgid(0, 0)
    if _CORES:  # the loop's thread may be pinned to some of them
        os.sched_setaffinity(0, _CORES)
    if sys.platform == "linux" and by_main_thread:
        # Sent when the thread ends that made this process, hence not where another thread did.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before the kernel knew
            os._exit(1)


def _how_it_ended(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
