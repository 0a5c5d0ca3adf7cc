"""Reduction of gradients on two ranks that are threads of one process."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mosaic.ranks.parameters import gradients
from mosaic.ranks.parameters.gradients import GradientReducer


class Sums:
    """Sums tensors of ranks that call ``all_reduce`` in one order: each rank's nth call meets the others' nth."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._lock = threading.Lock()
        self._totals: dict[int, torch.Tensor] = {}
        self._calls: dict[int, int] = {}
        self.sizes: list[int] = []

    def all_reduce(self, tensor: torch.Tensor, **_: Any) -> Any:
        with self._lock:
            me = threading.get_ident()
            place = self._calls[me] = self._calls.get(me, -1) + 1
            before = self._totals.get(place)
            self._totals[place] = tensor.clone() if before is None else before + tensor
            self.sizes.append(tensor.numel())

        class Work:
            @staticmethod
            def wait() -> None:
                self._barrier.wait()
                tensor.zero_().add_(self._totals[place])

        return Work()


def on_two_ranks(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[list[Any], Sums]:
    sums = Sums(2)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(gradients.dist, "all_reduce", sums.all_reduce)
    results: list[Any] = [None, None]

    def work(rank: int) -> None:
        results[rank] = run(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return results, sums


def reducer_of(parameters: list[nn.Parameter], **settings: Any) -> GradientReducer:
    group: Any = None
    return GradientReducer(parameters, group, waiting=lambda phase: nullcontext(), **settings)


def test_gradients_become_the_mean_and_accumulate_over_backwards(monkeypatch: pytest.MonkeyPatch):
    def run(rank: int) -> list[Any]:
        weight, other, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
        half = nn.Parameter(torch.ones(2, dtype=torch.float16))
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        reducer = reducer_of([weight, half, frozen, other, unused], bucket_bytes=8)
        found = []
        for step in range(3):
            loss = (weight * (rank + 1)).sum() + (half * (rank + 1)).sum().float()
            if rank:  # rank 0 has no gradient of it
                loss = loss + (other * 4).sum()
            loss.backward()
            reducer.finish()
            found.append([weight.grad.tolist(), half.grad.tolist(), other.grad.tolist(), unused.grad])
            if step == 0:
                kept = weight.grad
            else:
                for parameter in (weight, half, other):
                    parameter.grad = None
        assert kept.tolist() == [3.0, 3.0]
        return found

    results, sums = on_two_ranks(monkeypatch, run)
    once = [[1.5, 1.5], [1.5, 1.5], [2.0, 2.0], None]
    twice = [[3.0, 3.0], [3.0, 3.0], [4.0, 4.0], None]
    assert results == [[once, twice, once]] * 2
    assert sorted(set(sums.sizes)) == [2, 6], "the last bucket has a flag for each of four parameters"
