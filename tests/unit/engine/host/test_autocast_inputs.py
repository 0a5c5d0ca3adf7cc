"""A placed module's inputs under autocast: what the model made is cast at each use, as in the plain loop."""

from __future__ import annotations

import copy

import torch
from engine_cases import Record, assert_same, colocated, pair_batch, tower
from torch import nn


class Twice(nn.Module):
    """Uses one input in two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.second(x)


class NormedChain(nn.Module):
    """A norm, which autocast leaves in float32, between two placed modules."""

    def __init__(self) -> None:
        super().__init__()
        self.left = tower()
        self.norm = nn.LayerNorm(16)
        self.right = Twice()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.norm(self.left(x).float()))


def test_an_input_that_is_cast_twice_has_its_gradients_summed_as_in_the_plain_loop():
    torch.manual_seed(0)
    model = NormedChain()
    twin = copy.deepcopy(model)

    def result_of(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(pair_batch(step)[0])

    def train(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            loss = result_of(model, step).float().square().mean()
            loss.backward()
            record.note(loss)
            record.note_model(model)
            optimizer.step()
            optimizer.zero_grad()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain, ours = Record(), Record()
        train(model, plain)
        sample = lambda: result_of(twin, 0)  # noqa: E731
        with colocated(twin, sample, [{"left": 1}, {"right": 1}], include=["left", "right"]) as handle:
            train(twin, ours)
            assert "in place" not in handle.describe()
    finally:
        torch.set_num_threads(threads)
    assert_same(plain, ours)
