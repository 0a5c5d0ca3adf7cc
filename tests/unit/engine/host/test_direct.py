"""A module that has the whole device to itself runs where it is called, and takes turns with the lanes."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from engine_cases import colocated, pair_batch, tower
from torch import nn

SIDE_BY_SIDE = [{"left": 1, "right": 1}]


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


SEEN: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()  # its content is no state of a model's


class Noting(nn.Module):
    """A tower that notes whether it runs in the main thread."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = tower(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.put((id(self), threading.current_thread() is threading.main_thread()))
        return self.layers(x)


def in_main_thread(module: nn.Module) -> list[bool]:
    """Returns for each call of a module since the last look whether it ran in the main thread; forgets the others'."""
    calls = [SEEN.get() for _ in range(SEEN.qsize())]
    return [is_main for owner, is_main in calls if owner == id(module)]


class Joined(nn.Module):
    """Two towers, glue on each one's result, and a backbone over both; its result meets one tower's again."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Noting()
        self.right = Noting()
        self.backbone = Noting(32)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x).tanh(), self.right(y).sigmoid()
        above = self.backbone(torch.cat([left, right], dim=-1))
        return (above * left.mean() * self.scale).square()


def train(model: nn.Module, steps: int = 4) -> list[torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for step in range(steps):
        loss = model(*pair_batch(step)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def test_only_what_has_the_device_to_itself_runs_in_the_callers_thread():
    model = Joined()
    with colocated(model, pair_batch(), [*SIDE_BY_SIDE, {"backbone": 2}]):
        train(model, 1)  # lanes are learned
        for module, is_main in ((model.backbone, True), (model.left, False), (model.right, False)):
            in_main_thread(module)
            train(model, 2)
            assert in_main_thread(module) == [is_main] * 2
