"""A day's samples by position, and this rank's part of each global batch; workers that may die read it ahead.

A map-style data set gives the same samples on any number of ranks and workers. Over an iterable data set each rank
iterates by itself, and a run resumes with as many ranks as before: from the data set's state, which a checkpoint keeps,
or by drawing the same samples again. torchdata's ``StatefulDataLoader`` is not used: it keeps the same state, but it
neither checks that the state gives the same samples nor seeds them by position.
"""

from __future__ import annotations

import copy
import ctypes
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from typing import Any, Self

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from mosaic.errors import MosaicError
from mosaic.retrain.worker.positions import PositionStream, generators_of, put_back, sample_words, seed_sample

_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""Cores of this process at its start."""
_PR_SET_PDEATHSIG = 1
"""``prctl`` option: the signal that a process gets when its parent ends."""
_DYING_S = 0.5
"""Seconds for a worker to exit after its connections close."""
MAX_ATTEMPTS = 16
"""Rows of the same source that replace an unreadable row, at most."""
MIN_JUDGED = 1000
"""Least number of samples that the share of rejected rows is computed over."""
_MAX_DETAIL = 300
"""Most characters of an error's message."""
CHECKED = 4
"""Samples that the check at the start draws before, and after, it saves a state."""
Collate = Callable[[list[Any]], Any]


def is_iterable(data: Any) -> bool:
    """Returns True for a data set without length or index access."""
    return not (hasattr(data, "__getitem__") and isinstance(data, Sized))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """An unreadable row; another row of the same source took its position."""

    position: int
    source: str
    row: int
    reason: str
    """Kind of the error; rejected rows are counted by it."""
    detail: str


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
        last = rejects[-1]
        raise MosaicError(
            f"position {position} read no row of {name!r} in {MAX_ATTEMPTS + 1} attempts, the last of them row "
            f"{last.row}: {last.reason}: {last.detail}. Check that source, or remove it from the day"
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
            last = rejects[-1]
            raise MosaicError(
                f"{total} of {self.samples} samples drew a row that is unreadable, more than "
                f"{self.limit:.3g} of {judged}: {self.by_source}; the last is row {last.row} of {last.source!r}: "
                f"{last.reason}: {last.detail}. Mend or remove such rows, or allow more of them"
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

    def __post_init__(self) -> None:
        if self.batch < self._count:
            raise ValueError(
                f"batch={self.batch} is cut into {self._count} micro-batches on {self.num_ranks} ranks; take a batch "
                f"of {self._count} or more, or fewer ranks"
            )

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


class StepLoader(Iterator[StepBatch]):
    """Yields this rank's part of each step's global batch once; as a context it closes its workers.

    Attributes:
        rejects: Unreadable rows so far.
    """

    def __init__(self, cut: BatchCut, steps: range, rejects: RejectCount) -> None:
        self.cut = cut
        self.rejects = rejects
        self._steps = iter(steps)

    def __next__(self) -> StepBatch:
        step = next(self._steps)
        parts: list[MicroBatch] = []
        rejects: list[Reject] = []
        samples = 0
        for index in self.cut.own:
            positions = self.cut.positions(step, index)
            data, rejected = self._read(positions)
            parts.append(MicroBatch(index=index, weight=len(positions) / self.cut.batch, data=data))
            rejects += rejected
            samples += len(positions)
        self.rejects.add(rejects, samples)
        return StepBatch(micro_batches=tuple(parts), rejects=tuple(rejects))

    def _read(self, positions: range) -> tuple[Any, tuple[Reject, ...]]:
        """Returns the next collated micro-batch, and its unreadable rows that were replaced."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state after the steps yielded so far, beside their number; None if there is none."""
        return None

    def close(self) -> None:
        """Ends the workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class BatchLoader(StepLoader):
    """Reads samples by their positions; the number of workers does not change a batch.

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
        rejects: RejectCount | None = None,
    ) -> None:
        super().__init__(cut, steps, rejects or RejectCount())
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

    def _read(self, positions: range) -> tuple[Any, tuple[Reject, ...]]:
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

    def close(self) -> None:
        # After an error, the garbage collector would wait five seconds for each worker in vain.
        getattr(self._loaded, "_shutdown_workers", lambda: None)()
        self._loaded, self._steps = iter(()), iter(())


def _begin_worker(parent: int, by_main_thread: bool, worker: int) -> None:
    os.setpgid(0, 0)
    if _CORES:  # the loop's thread may be pinned to some of them
        os.sched_setaffinity(0, _CORES)
    if sys.platform == "linux" and by_main_thread:
        # The kernel sends it when the thread that started this process ends, so other threads do not count.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)


class IterableLoader(StepLoader):
    """Draws samples from an iterable data set, which starts again when it ends.

    If the data set or its iterator has ``state_dict`` and ``load_state_dict`` (torchdata's protocol), a run resumes
    from its saved state; a check before the first step compares the samples. Otherwise it draws the samples again.

    Raises:
        MosaicError: The state gives other samples, is missing although ``exact`` requires it, or belongs to other
            ranks; or the data set is empty.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        cut: BatchCut,
        steps: range,
        *,
        seed: int,
        state: Mapping[str, Any] | None = None,
        exact: bool = False,
        collate: Collate | None = None,
    ) -> None:
        super().__init__(cut, steps, RejectCount())
        self._dataset, self._iterator = dataset, iter(dataset)
        self._name = type(dataset).__name__
        self._seed, self._collate = seed, collate or default_collate
        self._shape = {"batch": cut.batch, "ranks": [cut.rank, cut.num_ranks]}
        if exact and not self._state():
            raise MosaicError(
                f"{self._name} has no state_dict and load_state_dict, so a resumed run would "
                "draw all samples again; add these methods, use a map-style data set, or set exact = false"
            )
        if state is None:
            if steps.start > 0:
                raise MosaicError(f"step {steps.start} needs a state of the data, and there is none; begin at step 0")
            self._check()
        elif (before := {name: state[name] for name in self._shape}) != self._shape:
            raise MosaicError(
                f"the state of the data is of {before} and this run has {self._shape}; an iterable data set resumes "
                "with as many ranks and as large a batch as it had. Use those, or a map-style data set"
            )
        elif state["data"] is not None:
            self._load(state["data"])
        else:
            for step in range(steps.start):
                for index in cut.own:
                    self._draw(cut.positions(step, index))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the steps yielded so far; each rank keeps its own."""
        return {**self._shape, "data": self._state()}

    def _read(self, positions: range) -> tuple[Any, tuple[Reject, ...]]:
        return self._collate(self._draw(positions)), ()

    def _state(self) -> dict[str, Any] | None:
        """The states of the data set and of its iterator, those of them that have one; None without any."""
        owners = {"dataset": self._dataset, "iterator": self._iterator}
        return {
            name: copy.deepcopy(owner.state_dict())
            for name, owner in owners.items()
            if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
        } or None

    def _load(self, state: Mapping[str, Any]) -> None:
        if "dataset" in state:
            self._dataset.load_state_dict(copy.deepcopy(state["dataset"]))  # type: ignore[attr-defined]
        self._iterator = iter(self._dataset)
        if "iterator" in state:
            self._iterator.load_state_dict(copy.deepcopy(state["iterator"]))  # type: ignore[attr-defined]

    def _draw(self, positions: Sequence[int]) -> list[Any]:
        samples = []
        with put_back():
            for words in sample_words(self._seed, positions).tolist():
                seed_sample(words)
                samples.append(self._next())
        return samples

    def _next(self) -> Any:
        for _ in range(2):
            for sample in self._iterator:
                return sample
            self._iterator = iter(self._dataset)
        raise MosaicError(f"{self._name} has no samples; look at what it reads")

    def _check(self) -> None:
        """Compares samples drawn after a saved state with those drawn after loading it, and begins again."""
        if (begin := self._state()) is None:
            return
        self._draw(range(CHECKED))
        saved, draws = self._state() or {}, []
        for _ in range(2):
            draws.append(self._draw(range(CHECKED, 2 * CHECKED)))
            self._load(saved)
        for index, (old, new) in enumerate(zip(*draws, strict=True)):
            pairs, tree = pytree.tree_flatten_with_path(old)
            leaves, other_tree = pytree.tree_flatten(new)
            contents = [
                (path, _content(left), _content(right)) for (path, left), right in zip(pairs, leaves, strict=False)
            ]
            differing = [f"sample{pytree.keystr(path)} is another" for path, left, right in contents if left != right]
            if tree != other_tree or differing:
                raise MosaicError(
                    f"{self._name} draws other samples after load_state_dict: of sample {index} after the saved state, "
                    f"{differing[0] if differing else 'sample has other entries'}. Its state_dict must hold all that "
                    "samples depend on, such as the place in a file and a shuffle buffer; without the two methods, "
                    "samples are drawn again"
                )
        self._load(begin)


def _content(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu().contiguous()
        return str(leaf.dtype), leaf.shape, leaf.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return str(leaf.dtype), leaf.shape, leaf.tobytes()
    if hasattr(leaf, "__dict__") and "__eq__" not in vars(type(leaf)):
        return type(leaf), [_content(value) for value in pytree.tree_leaves(vars(leaf))]
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf  # NaN equals NaN
