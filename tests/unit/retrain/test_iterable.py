from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from mosaic.errors import MosaicError
from mosaic.retrain.worker.loader import BatchCut, IterableLoader


class Plain:
    """Ten rows, shuffled through a small buffer by the default generator."""

    def __init__(self) -> None:
        self.next, self.buffer = 0, list[int]()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.next < 10 or self.buffer:
            while self.next < 10 and len(self.buffer) < 3:
                self.buffer.append(self.next)
                self.next += 1
            row = self.buffer.pop(random.randrange(len(self.buffer)))
            yield {"row": row, "noise": [torch.rand(2), np.random.rand(2)]}
        self.next = 0


class Stateful(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "buffer": self.buffer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next, self.buffer = state["next"], state["buffer"]


class LosesItsBuffer(Stateful):
    """As some shuffled streams do."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next, self.buffer = state["next"], []


class StatefulIterator:
    """A data set without a state, whose iterator has one."""

    def __iter__(self) -> Iterator[int]:
        return Counter()


class Counter(Iterator[int]):
    def __init__(self) -> None:
        self.next = 0

    def __next__(self) -> int:
        self.next += 1
        return self.next

    def state_dict(self) -> int:
        return self.next

    def load_state_dict(self, state: int) -> None:
        self.next = state


def loader(dataset: Any, first: int = 0, **options: Any) -> IterableLoader:
    return IterableLoader(dataset, BatchCut(batch=4, micro_batches=2), range(first, 8), seed=3, **options)


def contents(batches: Iterator[Any]) -> list[str]:
    return [str(part.data) for batch in batches for part in batch.micro_batches]


@pytest.mark.parametrize("kind", [Plain, Stateful, StatefulIterator])
def test_a_chain_of_runs_has_the_samples_of_a_single_run(kind: type):
    whole = contents(loader(kind()))
    chain, state = [], None
    for first, count in ((0, 3), (3, 2), (5, 3)):
        batches = loader(kind(), first, state=state)
        chain += contents([next(batches) for _ in range(count)])
        state = json.loads(json.dumps(batches.state_dict()))
    assert chain == whole
    assert len(set(whole)) == len(whole)


def test_states_that_are_missing_give_other_samples_or_are_of_other_ranks_are_refused():
    with pytest.raises(MosaicError, match=r"of sample 0 after the saved state, sample\['row'\] is another"):
        loader(LosesItsBuffer())
    state, cut = loader(Stateful()).state_dict(), BatchCut(batch=4, rank=1, num_ranks=2)
    with pytest.raises(MosaicError, match="as many ranks"):
        IterableLoader(Stateful(), cut, range(1, 8), seed=3, state=state)
    with pytest.raises(MosaicError, match="has no state_dict and load_state_dict"):
        loader(Plain(), exact=True)
