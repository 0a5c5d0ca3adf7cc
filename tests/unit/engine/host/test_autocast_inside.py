"""Autocast that begins and ends inside of the model's own forward, as accelerate arranges it."""

from __future__ import annotations

import threading

import torch
from engine_cases import SIDE_BY_SIDE, TwoTowers, pair_batch, run_both, train
from torch import nn


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


def casting(*, again: bool) -> CastInside:
    gate = CastInside.gate = threading.Event()
    return CastInside(Late(gate, again=again), Late(gate, again=again))


def test_weights_cast_by_a_lane_after_autocast_ended_are_not_used_in_the_next_step():
    described = run_both(lambda: casting(again=False), pair_batch(), SIDE_BY_SIDE, train(6))
    assert "in place" not in described


def test_a_weight_that_is_used_on_both_sides_of_autocast_s_end_keeps_its_module_in_place():
    described = run_both(lambda: casting(again=True), pair_batch(), SIDE_BY_SIDE, train(6))
    assert "it uses a weight several times, in an autocast that may end before its lane does" in described


def test_a_weight_used_several_times_inside_of_one_autocast_runs_on_its_lane():
    class Around(TwoTowers):
        gate = threading.Event()

    Around.gate.set()
    make = lambda: Around(Late(Around.gate, again=True), Late(Around.gate, again=True))  # noqa: E731

    def around(model, record):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*pair_batch(step)).float().square().mean()
            loss.backward()
            record.note(loss)
            record.note_model(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    assert "in place" not in run_both(make, pair_batch(), SIDE_BY_SIDE, around)
