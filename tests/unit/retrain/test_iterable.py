from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from mosaic.errors import MosaicError
from mosaic.retrain.worker.iterable import IterableLoader
from mosaic.retrain.worker.loader import BatchCut


class Plain:
    """Ten rows, shuffled through a small buffer by the default generator."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        buffer: list[int] = []
        for row in range(10):
            buffer.append(row)
            if len(buffer) == 3:
                yield self.sample(buffer.pop(random.randrange(3)))
        yield from map(self.sample, buffer)

    def sample(self, row: int) -> dict[str, Any]:
        self.drawn += 1
        return {"row": row, "noise": [torch.rand(2), np.random.rand(2)]}


class Stateful(Plain):
    """The same with the state that torchdata asks for; of the data set."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.next < 10 or self.buffer:
            while self.next < 10 and len(self.buffer) < 3:
                self.buffer.append(self.next)
                self.next += 1
            yield self.sample(self.buffer.pop(random.randrange(len(self.buffer))))
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "buffer": self.buffer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next, self.buffer = state["next"], state["buffer"]


class LosesItsBuffer(Stateful):
    """As some shuffled streams do."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next, self.buffer = state["next"], []


class Counter:
    """A stateful iterator, of a data set that has no state."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        self.next += 1
        return self.next

    def state_dict(self) -> int:
        return self.next

    def load_state_dict(self, state: int) -> None:
        self.next = state


class Counters:
    def __iter__(self) -> Counter:
        return Counter()


CUT = BatchCut(batch=4, micro_batches=2)


def loader(dataset: Any, first: int = 0, **options: Any) -> IterableLoader:
    return IterableLoader(dataset, CUT, range(first, 8), seed=3, **options)


def contents(batches: Iterator[Any]) -> list[str]:
    return [str(part.data) for batch in batches for part in batch.micro_batches]


@pytest.mark.parametrize("kind", [Plain, Stateful, Counters])
def test_a_chain_of_runs_has_the_samples_of_one(kind: type):
    whole = contents(loader(kind()))
    found, state = [], None
    for first in (0, 3, 5):
        batches = loader(kind(), first, state=state)
        found += contents([next(batches) for _ in range({0: 3, 3: 2, 5: 3}[first])])
        state = json.loads(json.dumps(batches.state_dict()))
    assert found == whole
    assert len(set(whole)) == len(whole)


def test_a_state_that_gives_other_samples_is_refused_at_the_start_with_the_first_difference():
    with pytest.raises(MosaicError, match=r"of sample 0 after the saved state, sample\['row'\] is another"):
        loader(LosesItsBuffer())


def test_the_state_of_other_ranks_is_refused():
    state = loader(Stateful()).state_dict()
    cut = BatchCut(batch=4, rank=1, num_ranks=2)
    with pytest.raises(MosaicError, match="as many ranks"):
        IterableLoader(Stateful(), cut, range(1, 8), seed=3, state=state)
