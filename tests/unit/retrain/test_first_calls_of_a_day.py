"""The first step of a process has the bits that it has in a process which began earlier."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_cases import colocated, pair_batch
from torch import nn

from mosaic.retrain.folder import DayFolder
from mosaic.retrain.recipe import Budget
from mosaic.retrain.records import DayNotes
from mosaic.retrain.worker.loader import MicroBatch, StepBatch
from mosaic.retrain.worker.loop import Loop, TrainState, WorkerGroup

STAGES = [{"left": 1, "right": 1}]


class ByThreads(torch.autograd.Function):
    """Its gradient depends on the number of threads, as the last bits of sums do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.get_num_threads()


class Tower(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ByThreads.apply(super().forward(x))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.left(one) + self.right(other)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch).square().mean()


def step(rows: tuple[int, ...]) -> StepBatch:
    parts = (
        MicroBatch(index=index, weight=count / sum(rows), data=pair_batch(index, count))
        for index, count in enumerate(rows)
    )
    return StepBatch(micro_batches=tuple(parts))


def loop_of(model: nn.Module, handle: Any, folder: Path) -> Loop:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model=model, keeper=handle, optimizers=(optimizer,), companions={})
    budget = Budget(batch=14, keep=1)
    program = SimpleNamespace(loss=loss, update_companions=None)
    work: Any = SimpleNamespace(program=program, budget=budget, day=DayFolder(folder))
    stop: Any = SimpleNamespace(received="")
    group, notes = WorkerGroup(torch.device("cpu")), DayNotes(loaded="", rejects={})
    return Loop(work=work, state=state, group=group, stop=stop, until=None, step=0, notes=notes)


def test_a_step_whose_calls_are_new_has_the_bits_of_one_whose_calls_are_known(tmp_path: Path):
    states, rows = [], (6, 4, 4)
    for is_known in (False, True):
        torch.manual_seed(0)
        model = Pair()
        first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with colocated(model, pair_batch(), STAGES, one_thread=True) as handle:
            if is_known:
                for part in step(rows).micro_batches:
                    loss(model, part.data).backward()
                model.zero_grad()
                model.load_state_dict(first)
            known = handle.num_learned
            loop_of(model, handle, tmp_path).take_step(step(rows))
            assert (handle.num_learned == known) is is_known
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    new, known_ones = states
    assert all(torch.equal(new[name], known_ones[name]) for name in new)
    assert not torch.equal(new["left.1.running_mean"], torch.zeros(16))
