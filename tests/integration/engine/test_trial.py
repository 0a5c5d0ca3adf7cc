"""Trials in the user's own loop: the fastest runs, or the loop runs as it was; nothing else changes."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

import pytest
import torch
from engine_cases import Trap, TwoTowers, pair_batch
from foreign_load import others_use
from torch import nn
from trial_cases import BESIDE, IN_TURN, PLAIN, LoopClock, running, steps, times, trying

import mosaic
from mosaic.backends.host.backend import HostBackend


def test_where_no_plan_wins_the_loop_runs_as_it_was_and_the_log_says_what_was_measured(
    model: TwoTowers, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, logger="mosaic"), trying(model) as (handle, clock):
        steps(model, handle, clock, times(plain=10, beside=9.9, in_turn=12))
        assert not handle.active
        assert type(model.left) is Trap
        described = handle.describe()
        assert "the model runs as it was" in described
        assert "tried the plain loop: measured 10.00 ms per step" in described
        assert f"tried {BESIDE}: measured 9.90 ms per step" in described
        assert (handle.metrics()["trial_ms/plain"], handle.metrics()[f"trial_ms/{BESIDE}"]) == pytest.approx((10, 9.9))
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "no plan is faster than the plain loop beyond the noise" in said
    assert said.count("trial: ") == 1


class OwnThread(nn.Module):
    """A module that computes something else on a lane's thread than on the loop's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
        self.home = threading.get_ident()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + (0.0 if threading.get_ident() == self.home else 0.01)


def test_a_plan_that_computes_something_else_on_the_sample_is_not_tried(caplog: pytest.LogCaptureFixture):
    torch.manual_seed(0)
    model = TwoTowers(Trap(), OwnThread())
    with trying(model) as (handle, clock):
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert sum(message.startswith(f"the trial goes on without {BESIDE}: on the sample") for message in warned) == 1
        assert BESIDE not in steps(model, handle, clock, times(plain=10, beside=5))
        assert f"tried {BESIDE}: no timed steps; on the sample its " in handle.describe()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans may be tried again after 60 steps."""
    monkeypatch.setattr("mosaic.engine.trial._RETRIAL_STEPS", 60)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("first", "then", "runs"), [("beside", "plain", PLAIN), ("plain", "beside", BESIDE)])
def test_a_loop_whose_steps_have_become_slower_tries_the_plans_again(
    model: TwoTowers, first: str, then: str, runs: str
):
    reference, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.01)
    before = {"plain": 10, "beside": 6} if first == "beside" else {"plain": 6, "beside": 10}
    slower = {"plain": 12, "beside": 20} if then == "plain" else {"plain": 20, "beside": 12}
    with trying(model) as (handle, clock):
        num_steps = len(steps(model, handle, clock, times(**before), optimizer=optimizer))
        decided = running(handle)
        assert decided == (BESIDE if first == "beside" else PLAIN)
        ran = steps(model, handle, clock, times(**slower), 300, optimizer=optimizer, until_decided=False)
        assert set(ran[:80]) == {decided}  # two windows: the first has 40 steps, and 60 must lie between two trials
        assert running(handle) == runs
        assert "trial 2 (40 steps in a row took " in handle.describe()
        assert handle.metrics()["trials"] == 2
        plain = torch.optim.SGD(reference.parameters(), lr=0.01)
        for count in (num_steps, 300):
            for step in range(count):
                reference(*pair_batch(step)).square().mean().backward()
                plain.step()
                plain.zero_grad()
        assert all(map(torch.equal, model.parameters(), reference.parameters()))


@pytest.mark.usefixtures("soon")
def test_a_trial_on_a_busy_machine_is_made_again_once(model: TwoTowers, monkeypatch: pytest.MonkeyPatch):
    with trying(model) as (handle, clock):
        others_use(monkeypatch, 0.5)
        steps(model, handle, clock, times(plain=10, beside=12))
        assert running(handle) == PLAIN
        others_use(monkeypatch, 0.0)
        steps(model, handle, clock, times(plain=10, beside=6), 300, until_decided=False)
        assert running(handle) == BESIDE
        assert "trial 2 (other processes used the CPU during the last one)" in handle.describe()
        assert handle.metrics()["trials"] == 2


def test_nothing_is_switched_while_a_backward_is_pending(model: TwoTowers):
    """A loop that goes backward a step late: plans cannot be switched, and the loop stays as it was."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trying(model) as (handle, clock):
        late: list[torch.Tensor] = []
        for step in range(40):
            late.append(model(*pair_batch(step)).square().mean())
            if step:
                late.pop(0).backward(retain_graph=False)
            clock.now_ms += 10
            assert running(handle) == PLAIN
            with torch.no_grad():
                optimizer.zero_grad()
            optimizer.step()
        assert "a backward is pending at every step" in handle.describe()


def test_two_optimizers_that_step_one_after_the_other_end_one_step(model: TwoTowers):
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.left, model.right)]
    with trying(model) as (handle, _):
        for step in range(3):
            model(*pair_batch(step)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert handle.metrics()["steps"] == 3


# What users do in the middle of one.


def until(model: TwoTowers, handle: Any, clock: LoopClock, what: str) -> None:
    for _ in range(100):
        if running(handle) == what:
            return
        steps(model, handle, clock, times(plain=10, beside=6), 1)
    raise AssertionError(f"{what} never ran")


def test_a_plan_under_which_a_module_breaks_its_contract_is_given_up_and_the_trial_goes_on(model: TwoTowers):
    with trying(model) as (handle, clock):
        until(model, handle, clock, BESIDE)
        steps(model, handle, clock, times(plain=10), 1)
        model.left.order = "write"
        with pytest.raises(mosaic.MosaicError, match="a parameter of 'left' was written to"):
            model(*pair_batch())
        model.left.order = "work"
        model(*pair_batch()).sum().backward()
        assert running(handle) != BESIDE
        steps(model, handle, clock, times(plain=10, in_turn=8))
        assert running(handle) == IN_TURN
        assert "ModuleContractError: a parameter of 'left' was written to" in handle.describe()


def test_a_plan_whose_lanes_cannot_be_opened_is_left_out(model: TwoTowers, monkeypatch: pytest.MonkeyPatch):
    backend = HostBackend(num_slots=2)
    plain_open = backend.open_lanes

    def refuse(partitions: Any) -> Any:
        wanted = list(partitions)
        if (0,) in wanted:
            raise mosaic.MosaicError("no lane for you")
        return plain_open(wanted)

    monkeypatch.setattr(backend, "open_lanes", refuse)
    with trying(model, backend=backend) as (handle, clock):
        steps(model, handle, clock, times(plain=10, in_turn=7))
        assert running(handle) == IN_TURN
        assert "its lanes could not be opened: MosaicError: no lane for you" in handle.describe()


@pytest.mark.parametrize("count", [0, 8])
def test_a_handle_that_is_removed_before_the_trial_has_ended_still_tells_what_it_measured(model: TwoTowers, count: int):
    with trying(model) as (handle, clock):
        steps(model, handle, clock, times(plain=10, beside=6), count)
        handle.remove()
        assert handle.metrics()["trial_steps"] <= count
        assert "ended without a decision" in handle.describe() or count == 0
