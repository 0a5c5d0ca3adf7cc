"""Iterable data sets: a checkpoint keeps their state, or a restart draws the same samples again.

A map-style data set is better: the position stream then gives the same samples on any number of ranks and workers.
Here each rank iterates over a data set of its own, in its own process, and a run resumes with as many ranks as before.
torchdata's ``StatefulDataLoader`` is not used: it keeps the same state, but it neither checks that the state gives the
same samples nor seeds them by position.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from mosaic.errors import MosaicError
from mosaic.retrain.worker.loader import BatchCut, Collate, Reject, RejectCount, StepLoader
from mosaic.retrain.worker.seeds import put_back, sample_words, seed_sample

CHECKED = 4
"""Samples that the check at the start draws before, and after, it saves a state."""


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
