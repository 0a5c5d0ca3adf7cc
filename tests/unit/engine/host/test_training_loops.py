"""Loops as people write them: the colocated model computes what the plain one does, bit for bit."""

from __future__ import annotations

import threading
from typing import Any

import engine_cases
import pytest
import stream_cases
import torch
from engine_cases import (
    SIDE_BY_SIDE,
    Record,
    TwoTowers,
    colocate,
    pair_batch,
    run_both,
    tower,
    train,
)
from loop_cases import LOOPS, NOT_THERE, check, check_removing_between_forward_and_backward, differentiable
from torch import nn


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_equal_to_the_plain_one(name: str):
    check(LOOPS[name], run_both, LOOPS[name].host)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", [name for name, case in LOOPS.items() if case.streams != NOT_THERE])
def test_a_loop_on_streams_is_equal_to_the_plain_one_with_every_launch_in_order(name: str):
    check(LOOPS[name], stream_cases.run_both, LOOPS[name].streams)


@pytest.mark.parametrize("cases", [engine_cases, stream_cases], ids=["host", "streams"])
def test_removing_between_forward_and_backward_is_equal(cases: Any):
    check_removing_between_forward_and_backward(cases.colocated)


def test_gradients_of_gradients_are_refused_and_work_when_disabled():
    model = TwoTowers()
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        for step in range(3):
            batch = differentiable(step)
            model(*batch).sum().backward()
        with pytest.raises(Exception, match="create_graph=True"):
            torch.autograd.grad(model(*batch).sum(), batch, create_graph=True)
        with handle.disabled():
            (grad, _) = torch.autograd.grad(model(*batch).square().sum(), batch, create_graph=True)
            grad.square().sum().backward()
    finally:
        handle.remove()


# Autocast that begins and ends inside of the model's own forward, as accelerate arranges it.


class Late(nn.Module):
    """On a lane it waits at a gate before it uses its weight again, so that its casts straddle the gate's opening."""

    def __init__(self, gate: threading.Event, *, again: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.again = again
        self.__dict__["gate"] = gate

    def __deepcopy__(self, memo: object) -> Late:
        twin = Late(self.gate, again=self.again)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.again:
            hidden = self.second(hidden).tanh()
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(60)
        return self.second(hidden)


class CastInside(TwoTowers):
    """Every other time its autocast ends before anybody needs what the towers compute; else only after that."""

    gate: threading.Event
    calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.gate.clear()
        with torch.autocast("cpu", torch.bfloat16):
            left, right = self.left(x), self.right(y)
            if self.calls % 2:
                self.gate.set()
                assert left.sum().item() != right.sum().item()
        self.gate.set()
        return left.float() @ right.float().T


@pytest.mark.parametrize(
    ("again", "said"), [(False, None), (True, "it uses a weight several times, in an autocast that may end before")]
)
def test_weights_cast_by_a_lane_after_autocast_ended_are_not_used_in_the_next_step(again: bool, said: str | None):
    def make() -> CastInside:
        gate = CastInside.gate = threading.Event()
        return CastInside(Late(gate, again=again), Late(gate, again=again))

    described = run_both(make, pair_batch(), SIDE_BY_SIDE, train(6), on_lanes=said is None)
    assert "in place" not in described if said is None else said in described


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.second(x)


class NormedChain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.norm, self.right = tower(), nn.LayerNorm(16), Twice()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.right(self.norm(self.left(x).float()))


def test_an_input_that_is_cast_twice_has_its_gradients_summed_as_in_the_plain_loop():
    def loop(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            loss = model(pair_batch(step)[0]).float().square().mean()
            loss.backward()
            record.note(loss)
            record.note_model(model)
            optimizer.step()
            optimizer.zero_grad()

    stages = [{"left": 1}, {"right": 1}]
    assert "in place" not in run_both(NormedChain, pair_batch()[:1], stages, loop, include=["left", "right"])
