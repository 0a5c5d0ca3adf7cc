"""A module that has the whole device to itself runs where it is called, and takes turns with the lanes."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterable

import pytest
import torch
from engine_cases import Record, TwoTowers, assert_same, colocated, pair_batch, tower
from stream_cases import colocated as colocated_on_streams
from torch import nn

SIDE_BY_SIDE = [{"left": 1, "right": 1}]
IN_TURN = [{"left": 2}, {"right": 2}]


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


def assert_equal(plain: Iterable[torch.Tensor], colocated: Iterable[torch.Tensor]) -> None:
    assert_same(Record(list(plain)), Record(list(colocated)))


def test_training_is_equal_bit_for_bit():
    torch.manual_seed(0)
    model = Joined()
    plain = copy.deepcopy(model)
    expected = train(plain)
    with colocated(model, pair_batch(), [*SIDE_BY_SIDE, {"backbone": 2}]) as handle:
        found = train(model)
        assert handle.metrics()["calls_in_place"] == 0
    assert_equal(expected, found)
    assert_equal(plain.parameters(), model.parameters())


def test_only_what_has_the_device_to_itself_runs_in_the_callers_thread():
    model = Joined()
    with colocated(model, pair_batch(), [*SIDE_BY_SIDE, {"backbone": 2}]):
        train(model, 1)  # lanes are learned
        for module, is_main in ((model.backbone, True), (model.left, False), (model.right, False)):
            in_main_thread(module)
            train(model, 2)
            assert in_main_thread(module) == [is_main] * 2


def test_it_goes_to_a_lane_where_the_caller_has_another_number_of_threads():
    model = Joined()
    with colocated(model, pair_batch(), [*IN_TURN, {"backbone": 2}]):
        torch.set_num_threads(1)
        in_main_thread(model.left)
        train(model, 2)
    assert in_main_thread(model.left) == [True, False]


def test_lanes_are_at_rest_while_it_runs():
    model = Joined()
    may_end = threading.Event()
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()  # its content is no state of the model's

    def slowly(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            may_end.wait(30)
            seen.put("right")

    model.right.register_forward_hook(slowly)
    model.backbone.register_forward_pre_hook(lambda *_: seen.put("backbone"))
    model.forward = lambda x, y: (model.right(y).sum(), model.backbone(torch.cat([x, x, x, x], dim=-1)).sum())
    with colocated(model, pair_batch(), [{"right": 1}, {"backbone": 2}]) as handle:
        model(*pair_batch())
        while not seen.empty():
            seen.get()
        lanes = handle._executor.lanes
        drain = lanes.drain

        def watched() -> None:
            may_end.set()
            drain()

        lanes.drain = watched
        model(*pair_batch())
    assert [seen.get(), seen.get()] == ["right", "backbone"]


def test_on_streams_it_takes_turns_with_lanes_and_stays_equal():
    torch.manual_seed(0)
    model = Joined()
    plain = copy.deepcopy(model)
    expected = train(plain)
    with colocated_on_streams(model, pair_batch(), [*SIDE_BY_SIDE, {"backbone": 2}]) as (handle, backend):
        found = train(model)
        assert backend.launches_of(handle, "backbone") == []
        assert backend.launches_of(handle, "left") != []
        assert handle.metrics()["backward_ms/backbone"] >= 0
    assert_equal(expected, found)


def test_on_streams_a_lane_starts_behind_it():
    model = TwoTowers()
    with colocated_on_streams(model, pair_batch(), [{"left": 2}, {"right": 1}]) as (handle, backend):
        model(*pair_batch())
        backend.api.launches.clear()
        model(*pair_batch())
        own = [launch for launch in backend.api.launches if launch.name == "aten.addmm.default"]
        (right,) = {launch.stream for launch in backend.launches_of(handle, "right")}
        left = [launch for launch in own if launch.stream != right]
        assert left
        assert backend.launches_of(handle, "right")[0].is_after(left[1])
