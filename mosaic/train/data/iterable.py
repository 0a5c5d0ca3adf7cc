"""Data sets that can only be gone through: their own state is kept, or what was drawn is drawn again.

A map-style data set is better: the position stream then gives the same samples on any number of ranks and workers.
Here each rank goes through a data set of its own, in its own process, and a run goes on with as many ranks as it had.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from mosaic.errors import MosaicError
from mosaic.train.data.loader import BatchCut, Collate, MicroBatch, StepBatch, StepLoader
from mosaic.train.data.samples import RejectCount
from mosaic.train.data.seeds import put_back, sample_words, seed_sample

CHECKED = 4
"""Samples that are drawn before, and after, a state is saved at the start."""


class IterableLoader(StepLoader):
    """Yields this rank's part of each global batch from an iterable data set, which begins anew when it ends.

    With ``state_dict`` and ``load_state_dict`` (torchdata's protocol), of the data set or of its iterator, a run goes
    on from the state that it saved; whether that gives the same samples is tried before the first step. Without, what
    was drawn is drawn again, and ``skipped_s`` says how long it took.

    Args:
        dataset: This rank's.
        cut: How a global batch is cut.
        steps: To yield; a run that goes on begins after those taken.
        seed: Samples are drawn under it and their position.
        state: What ``state_dict`` returned after the step before; None at the beginning.
        exact: Whether to refuse a data set without a state.
        collate: Makes a batch of a list of samples; torch's own by default.

    Raises:
        MosaicError: The state does not give the same samples, there is none and ``exact`` asks for it, it is of other
            ranks, or the data set is empty.
    """

    skipped_s: float = 0.0
    """Seconds that it took to draw again what had been drawn."""

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
                f"{type(dataset).__name__} has no state_dict and load_state_dict, so that a run that goes on would "
                "have to draw all samples again; give it these, or a map-style data set, or allow it with exact = false"
            )
        if state is None and steps.start > 0:
            raise MosaicError(f"step {steps.start} follows others, and there is no state of the data; begin at step 0")
        if state is not None:
            self._go_on(state, steps.start)
        elif self._source.has_state:
            self._source.check(seed)

    def state_dict(self) -> dict[str, Any]:
        """Returns what going on needs after the steps yielded so far; to be kept by each rank for itself."""
        return {"batch": self._cut.batch, "ranks": [self._cut.rank, self._cut.num_ranks], "data": self._source.state()}

    def __next__(self) -> StepBatch:
        """Returns the next step's batch."""
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
                f"the state of the data is of {was} and this run has {now}; an iterable data set goes on with as many "
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
    """An iterable data set with its iterator; one of the two may have a state."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        self._iterator = iter(dataset)

    @property
    def has_state(self) -> bool:
        return any(map(_is_stateful, (self._dataset, self._iterator)))

    def state(self) -> dict[str, Any] | None:
        """Returns copies of the states, which the next sample does not change."""
        if not self.has_state:
            return None
        both = {"dataset": self._dataset, "iterator": self._iterator}
        return {name: copy.deepcopy(one.state_dict()) for name, one in both.items() if _is_stateful(one)}  # type: ignore[attr-defined]

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from states that ``state`` returned."""
        if "dataset" in state:
            self._dataset.load_state_dict(copy.deepcopy(state["dataset"]))  # type: ignore[attr-defined]
        self._iterator = iter(self._dataset)
        if "iterator" in state:
            self._iterator.load_state_dict(copy.deepcopy(state["iterator"]))  # type: ignore[attr-defined]

    def draw(self, seed: int, positions: Sequence[int]) -> list[Any]:
        """Draws the next sample for each position."""
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
        """Draws some samples, saves the state, draws more, loads the state, and compares what comes then.

        Afterwards the data set is where it was.

        Raises:
            MosaicError: The samples differ; names the first that does, and where.
        """
        begin = self.state() or {}
        self.draw(seed, range(CHECKED))
        saved = self.state() or {}
        drawn = []
        for _ in range(2):
            drawn.append(self.draw(seed, range(CHECKED, 2 * CHECKED)))
            self.load(saved)
        for index, (one, other) in enumerate(zip(*drawn, strict=True)):
            if found := difference(one, other):
                raise MosaicError(
                    f"{type(self._dataset).__name__} goes on with other samples after load_state_dict: of sample "
                    f"{index} after the saved state, {found}. Its state_dict has to hold all that samples depend on, "
                    "such as the place in a file and a shuffle buffer; without the two methods, samples are drawn again"
                )
        self.load(begin)


def _is_stateful(source: object) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def difference(one: Any, other: Any, where: str = "sample") -> str:
    """Returns the first place where two samples differ, and how; empty where they are equal."""
    if type(one) is not type(other):
        return f"{where} is a {type(one).__name__}, then a {type(other).__name__}"
    if isinstance(one, Mapping | list | tuple):
        keys = list(one) if isinstance(one, Mapping) else range(len(one))
        if len(one) != len(other) or (isinstance(one, Mapping) and one.keys() != other.keys()):
            return f"{where} has {len(one)} entries, then {len(other)}, or of other names"
        return next((found for key in keys if (found := difference(one[key], other[key], f"{where}[{key!r}]"))), "")
    if isinstance(one, torch.Tensor):
        one, other = one.detach().cpu(), other.detach().cpu()
        one, other = (tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor for tensor in (one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{where} is {one.dtype}{list(one.shape)}, then {other.dtype}{list(other.shape)}"
        apart = int(np.sum((one != other) & ~((one != one) & (other != other))))
        return f"{where} has {apart} of {one.size} other values" if apart else ""
    if hasattr(one, "__dict__") and "__eq__" not in vars(type(one)):
        return difference(vars(one), vars(other), where)
    return "" if one == other or (one != one and other != other) else f"{where} is {one!r:.60}, then {other!r:.60}"
