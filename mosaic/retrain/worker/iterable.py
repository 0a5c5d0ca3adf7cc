"""Iterable data sets: a checkpoint keeps their state, or a restart draws the same samples again.

A map-style data set is better: the position stream then gives the same samples on any number of ranks and workers.
Here each rank iterates over a data set of its own, in its own process, and a run resumes with as many ranks as before.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from mosaic.errors import MosaicError
from mosaic.retrain.worker.loader import BatchCut, Collate, MicroBatch, RejectCount, StepBatch, StepLoader
from mosaic.retrain.worker.seeds import put_back, sample_words, seed_sample

CHECKED = 4
"""Samples that the check at the start draws before, and after, it saves a state."""


class IterableLoader(StepLoader):
    """Yields this rank's part of each global batch from an iterable data set, which starts again when it ends.

    If the data set or its iterator has ``state_dict`` and ``load_state_dict`` (torchdata's protocol), a run resumes
    from its saved state; a check before the first step compares the samples. Otherwise the loader draws the samples
    again, and ``skipped_s`` is the time that takes.

    Raises:
        MosaicError: The state gives other samples, is missing although ``exact`` requires it, or belongs to other
            ranks; or the data set is empty.
    """

    skipped_s: float = 0.0
    """Seconds spent on drawing samples again."""

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
        self.rejects = RejectCount()
        self._source = _Source(dataset)
        self._cut = cut
        self._steps = iter(steps)
        self._seed = seed
        self._collate = collate or default_collate
        if exact and not self._source.has_state:
            raise MosaicError(
                f"{type(dataset).__name__} has no state_dict and load_state_dict, so a resumed run would "
                "draw all samples again; add these methods, use a map-style data set, or set exact = false"
            )
        if state is None and steps.start > 0:
            raise MosaicError(f"step {steps.start} needs a state of the data, and there is none; begin at step 0")
        if state is not None:
            self._go_on(state, steps.start)
        elif self._source.has_state:
            self._source.check(seed)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the steps yielded so far; each rank keeps its own."""
        return {"batch": self._cut.batch, "ranks": [self._cut.rank, self._cut.num_ranks], "data": self._source.state()}

    def __next__(self) -> StepBatch:
        step = next(self._steps)
        parts = []
        for index in self._cut.own:
            samples = self._source.draw(self._seed, self._cut.positions(step, index))
            rows, data = len(samples), self._collate(samples)
            parts.append(MicroBatch(index=index, rows=rows, weight=rows / self._cut.batch, data=data))
        return StepBatch(step=step, micro_batches=tuple(parts), rejects=())

    def _go_on(self, state: Mapping[str, Any], first_step: int) -> None:
        now = {"batch": self._cut.batch, "ranks": [self._cut.rank, self._cut.num_ranks]}
        was = {name: state[name] for name in now}
        if was != now:
            raise MosaicError(
                f"the state of the data is of {was} and this run has {now}; an iterable data set resumes with as many "
                "ranks and as large a batch as it had. Use those, or a map-style data set"
            )
        if state["data"] is not None:
            self._source.load(state["data"])
            return
        began = time.monotonic()
        for step in range(first_step):
            for index in self._cut.own:
                self._source.draw(self._seed, self._cut.positions(step, index))
        self.skipped_s = time.monotonic() - began


class _Source:
    """An iterable data set with its iterator; either may have a state."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        self._iterator = iter(dataset)

    @property
    def has_state(self) -> bool:
        return any(map(_is_stateful, (self._dataset, self._iterator)))

    def state(self) -> dict[str, Any] | None:
        if not self.has_state:
            return None
        owners = {"dataset": self._dataset, "iterator": self._iterator}
        return {name: copy.deepcopy(owner.state_dict()) for name, owner in owners.items() if _is_stateful(owner)}  # type: ignore[attr-defined]

    def load(self, state: Mapping[str, Any]) -> None:
        if "dataset" in state:
            self._dataset.load_state_dict(copy.deepcopy(state["dataset"]))  # type: ignore[attr-defined]
        self._iterator = iter(self._dataset)
        if "iterator" in state:
            self._iterator.load_state_dict(copy.deepcopy(state["iterator"]))  # type: ignore[attr-defined]

    def draw(self, seed: int, positions: Sequence[int]) -> list[Any]:
        samples = []
        with put_back():
            for words in sample_words(seed, positions).tolist():
                seed_sample(words)
                samples.append(self._next())
        return samples

    def _next(self) -> Any:
        for sample in self._iterator:
            return sample
        self._iterator = iter(self._dataset)
        for sample in self._iterator:
            return sample
        raise MosaicError(f"{type(self._dataset).__name__} has no samples; look at what it reads")

    def check(self, seed: int) -> None:
        """Compares samples drawn after a saved state with those drawn after loading it.

        The data set ends in the state in which it began.

        Raises:
            MosaicError: The samples differ; names the first difference.
        """
        begin = self.state() or {}
        self.draw(seed, range(CHECKED))
        saved = self.state() or {}
        draws = []
        for _ in range(2):
            draws.append(self.draw(seed, range(CHECKED, 2 * CHECKED)))
            self.load(saved)
        for index, (old, new) in enumerate(zip(*draws, strict=True)):
            if mismatch := difference(old, new):
                raise MosaicError(
                    f"{type(self._dataset).__name__} draws other samples after load_state_dict: of sample "
                    f"{index} after the saved state, {mismatch}. Its state_dict must hold all that samples depend on, "
                    "such as the place in a file and a shuffle buffer; without the two methods, samples are drawn again"
                )
        self.load(begin)


def _is_stateful(source: object) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def difference(old: Any, new: Any) -> str:
    """Names the first place in which two samples differ; empty if they are equal."""
    pairs, tree = pytree.tree_flatten_with_path(old)
    leaves, other_tree = pytree.tree_flatten(new)
    if tree != other_tree:
        return "sample has other entries"
    for (path, left), right in zip(pairs, leaves, strict=True):
        if _content(left) != _content(right):
            return f"sample{pytree.keystr(path)} is another"
    return ""


def _content(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu().contiguous()
        return str(leaf.dtype), leaf.shape, leaf.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return str(leaf.dtype), leaf.shape, leaf.tobytes()
    if hasattr(leaf, "__dict__") and "__eq__" not in vars(type(leaf)):
        return type(leaf), [_content(value) for value in pytree.tree_leaves(vars(leaf))]
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf  # NaN equals NaN
