"""Placed calls on streams: what is concurrent, what is ordered, and that each ordering is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, TwoTowers, pair_batch
from fake_streams import FakeStreams, Launch, RaceError
from stream_cases import Projected, colocated, steps
from torch import nn

from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.order import LaneOrder, Orders
from mosaic.engine.streams.tensor import StreamTensor
from mosaic.errors import ModuleContractError

THREE = [{f"towers.{index}": 1 for index in range(3)}, {"head": 1}]


def triple(step: int = 0) -> tuple[torch.Tensor, ...]:
    return (*pair_batch(step), pair_batch(step + 50)[0])


def pairs(one: list[Launch], other: list[Launch]) -> Iterator[tuple[Launch, Launch]]:
    return ((a, b) for a in one for b in other)


def test_placed_modules_and_their_glue_are_not_ordered_among_each_other():
    model = Projected()
    with colocated(model, triple(), THREE, num_slots=3) as (handle, backend):
        for step in range(3):
            backend.api.launches.clear()
            out = model(*triple(step))
            lanes = [backend.launches_of(handle, f"towers.{index}") for index in range(3)]
            ends = [next(i for i, one in enumerate(lane) if one.name == "aten.div.Tensor") for lane in lanes]
            for index in range(3):
                names = [launch.name for launch in lanes[index][: ends[index] + 1]]
                assert names.count("aten.addmm.default") == 2
                assert "aten.mm.default" in names
                for other in range(index):
                    both = pairs(lanes[index][: ends[index] + 1], lanes[other][: ends[other] + 1])
                    assert all(a.is_concurrent_with(b) for a, b in both)
            head = [one for one in backend.launches_of(handle, "head") if one.name == "aten.addmm.default"][2]
            assert head.is_after(lanes[0][0])
            assert head.is_after(lanes[1][0])
            assert head.is_concurrent_with(lanes[2][-1])
            out.sum().backward()


def beside(work: Callable[[], Any], *, wait_s: float) -> tuple[threading.Thread, list[Any]]:
    """Begins work in a thread of its own, and waits for its end for some time."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(work())
        except Exception as error:  # for the test to look at
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(wait_s)
    return thread, ended


@torch.no_grad()
def test_threads_that_call_the_model_take_turns():
    others: list[tuple[threading.Thread, list[Any]]] = []

    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        if self.training:
            self.eval()
            others.append(beside(lambda: self(y, x), wait_s=0.2))
            assert not others[0][1]
        return left @ self.right(y).T

    model = Glued(glue).eval()
    x, y = pair_batch()
    expected = [model(x, y), model(y, x)]
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        model.train()
        assert torch.equal(model(x, y), expected[0])
        others[0][0].join()
        assert torch.equal(others[0][1][0], expected[1])


def test_a_thread_that_calls_a_module_while_another_is_in_the_model_is_refused_by_name():
    others: list[tuple[threading.Thread, list[Any]]] = []

    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        if not self.training:
            others.append(beside(lambda: self.right(y), wait_s=60))
        return left @ self.right(y).T

    model = Glued(glue)
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        model.eval()
        model(*pair_batch())
        assert isinstance(others[0][1][0], ModuleContractError)
        assert "'right' is called by one thread while another is in a call of the model" in str(others[0][1][0])
        assert isinstance(model.right(pair_batch()[1]), StreamTensor)


# Every ordering is needed: without it a race is found.


def let_go_early(model: nn.Module) -> None:
    with torch.no_grad():
        x, y = pair_batch()
        _ = model.left(x * 2)
        _ = y * 2


def in_a_buffer(model: nn.Module) -> None:
    buffer, y = pair_batch()
    model.forward = lambda x, y: (model.left(x), model.right(y))[1]  # type: ignore[method-assign]
    for step in range(3):
        buffer.copy_(pair_batch(step)[0])
        model(buffer, y)


def gradients_in_the_call(model: nn.Module) -> None:
    parameters = list(model.left.parameters())

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = model.left(x)
        gradients = torch.autograd.grad(left.square().sum(), parameters)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        del gradients
        return model.left(x).sum() * penalty

    model.forward = forward  # type: ignore[method-assign]
    model(*pair_batch())


class Strange(torch.Tensor):
    pass


def results_of_another_class(model: nn.Module) -> None:
    model.left.forward = lambda x: tower.forward(x).as_subclass(Strange)  # type: ignore[method-assign]
    tower = nn.Sequential(*model.left)

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = model.left(x).as_subclass(torch.Tensor)
        total = left.sum()
        del left
        return model.left(x).as_subclass(torch.Tensor).sum() * total

    model.forward = forward  # type: ignore[method-assign]
    with torch.no_grad():
        model(*pair_batch())


def reaching_into_a_module(model: nn.Module) -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        right = model.right(y).sum()
        for parameter in model.right.parameters():
            parameter.data.mul_(0.9)  # past torch's count of writes
        return model.left(x).sum() + right

    model.forward = forward  # type: ignore[method-assign]
    with torch.no_grad():
        model(*pair_batch())


def nothing(*_: Any, **__: Any) -> None:
    pass


SEEDED: dict[str, tuple[Any, str, Callable[[nn.Module], None]]] = {
    "the wait for a producer": (LaneOrder, "hold", steps),
    "telling the allocator": (FakeStreams, "record_use", let_go_early),
    "the wait for the beginning of a call": (LaneOrder, "enter", steps),
    "the wait of who reaches into a module": (StreamExecutor, "reach", reaching_into_a_module),
    "the join at the end of a call": (Orders, "join", in_a_buffer),
    "the wait for gradients' readers": (LaneOrder, "lend", gradients_in_the_call),
    "the wait for readers of strange results": (LaneOrder, "lend", results_of_another_class),
}


@pytest.mark.parametrize("what", SEEDED)
def test_without_one_ordering_there_is_a_race(what: str, monkeypatch: pytest.MonkeyPatch):
    owner, name, loop = SEEDED[what]
    torch.manual_seed(0)
    with colocated(TwoTowers(), pair_batch(), SIDE_BY_SIDE) as (handle, _):
        loop(handle._model)
    with colocated(TwoTowers(), pair_batch(), SIDE_BY_SIDE) as (handle, _):
        monkeypatch.setattr(owner, name, nothing)
        with pytest.raises((RaceError, ModuleContractError)):
            loop(handle._model)
        monkeypatch.undo()


# What modules exchange other than by arguments and results.


def by_its_argument() -> TwoTowers:
    """Writes into what the module is given before it is called, past torch's count of writes."""

    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.data.mul_(2)
        return self.left(x) @ self.right(y).T

    return Glued(glue)


def by_a_buffer() -> TwoTowers:
    """Reads a module's buffer."""

    def counting(self: Doing, y: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(y)
        self.total += hidden.detach().sum()
        return hidden

    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(y)
        return buffers[0] * 2 + left @ right.T

    model = Glued(glue, right=Doing(counting))
    model.right.register_buffer("total", torch.zeros(()))
    buffers = list(model.right.buffers())
    return model


@pytest.mark.parametrize("make", [by_its_argument, by_a_buffer])
def test_what_goes_past_arguments_and_results_keeps_to_the_loop_s_order(make: Callable[[], TwoTowers]):
    with colocated(make(), pair_batch(), SIDE_BY_SIDE) as (handle, _):
        steps(handle._model)
        assert "right keeps to the order of the loop's own stream: it" in handle.describe()
        assert "left keeps" not in handle.describe()
        assert handle._executor is not None
        handle._executor.in_order.clear()
        with pytest.raises((RaceError, ModuleContractError)):
            steps(handle._model)


def test_a_module_that_writes_into_its_argument_waits_for_whoever_reads_it():
    def rewriting(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = self.left(x).detach() * 1
        mixed = left + self.right(y)
        return self.head(left) + mixed

    model = Glued(rewriting)
    model.head = Doing(lambda self, x: self.layers(x.clamp_(-1, 1)), 16)
    with colocated(model, pair_batch(), [*SIDE_BY_SIDE, {"head": 2}], num_slots=3) as (handle, _):
        steps(handle._model)
        assert "head keeps to the order of the loop's own stream: it writes into its arguments" in handle.describe()
        assert handle._executor is not None
        handle._executor.in_order.clear()
        with pytest.raises((RaceError, ModuleContractError)):
            steps(handle._model)


def test_a_tensor_of_the_loop_that_is_written_to_while_a_lane_may_read_it_is_found_out():
    def writing(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        if not self.training:
            with torch.no_grad():
                x.add_(1)
        return left @ self.right(y).T

    model = Glued(writing)
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        model.eval()
        with torch.no_grad(), pytest.raises((RaceError, ModuleContractError)):
            model(*pair_batch())
        model.train()
        steps(model)
