"""``with mosaic.stage() as s``: the explicit form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_cases import Record, assert_same, pair_batch, tower
from torch import nn

import mosaic
from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.errors import InvalidPlanError


class Explicit(nn.Module):
    """Runs its branches in a stage, or plainly."""

    def __init__(self, quotas: dict[str, int] | None = None) -> None:
        super().__init__()
        self.left, self.right, self.head = tower(), tower(8, 16, nn.Dropout(0.2)), nn.Linear(16, 4)
        self.quotas, self.plain = quotas, False

    def encode(self, x: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        return {"hidden": self.right(x) * scale}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.plain:
            left, right = self.left(x), self.encode(y, scale=0.5)["hidden"]
            return self.head(left.relu() * right)
        with mosaic.stage(self.quotas) as s:
            left = s.run("left", self.left, x).relu()
            right = s.run("right", self.encode, y, scale=0.5)["hidden"]
        return self.head(left * right)


def steps(model: Explicit) -> Record:
    record = Record()
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(5):
        loss = model(*pair_batch(step)).square().mean()
        loss.backward()
        record.note(loss)
        record.note_model(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return record


@pytest.mark.parametrize("quotas", [None, {"left": 1}], ids=["by turns", "by quota"])
def test_a_stage_computes_what_the_plain_code_does(quotas: dict[str, int] | None):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Explicit(quotas if quotas is None else {"left": 1, "right": 1} if threads > 1 else None)
    twin = copy.deepcopy(model)
    twin.plain = True
    assert_same(steps(twin), steps(model))
    torch.set_num_threads(threads)


def test_results_are_joined_when_the_block_closes():
    module = tower()
    x = pair_batch()[0]
    for _ in range(2):
        found = None
        with mosaic.stage() as s:
            found = s.run("joined", module, x)
    assert isinstance(found, LaneTensor)
    assert found._joined is not None
    assert type(found + 1) is torch.Tensor


def test_an_error_is_raised_in_the_block_at_the_latest():
    orders = ["work"]

    def work(x: torch.Tensor) -> torch.Tensor:
        if orders[-1] == "fail":
            raise ValueError("no")
        return x + 1

    for _ in range(2):
        with mosaic.stage() as s:
            s.run("failing", work, torch.ones(3))
    orders.append("fail")
    with pytest.raises(ValueError, match="no"), mosaic.stage() as s:  # noqa: PT012
        kept = s.run("failing", work, torch.ones(3))
        assert kept.shape == (3,)
    orders.append("work")
    with mosaic.stage() as s:
        kept = s.run("failing", work, torch.ones(3))
    assert torch.equal(kept + 0, torch.full((3,), 2.0))


def test_an_error_of_the_block_itself_comes_through():
    with pytest.raises(KeyError, match="mine"), mosaic.stage() as s:  # noqa: PT012
        s.run("innocent", torch.sin, torch.ones(3))
        raise KeyError("mine")


def test_names_that_share_a_parameter_run_in_place_with_right_gradients():
    shared = tower()
    gradients: list[Any] = []
    for plain in (True, False):
        shared.zero_grad()
        for step in range(3):
            x, y = pair_batch(step)
            if plain:
                loss = (shared(x) * shared(y)).sum()
            else:
                with mosaic.stage() as s:
                    loss = (s.run("one", shared, x) * s.run("other", shared, y)).sum()
            loss.backward()
        gradients.append([parameter.grad.clone() for parameter in shared.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_name_outside_of_the_plan_is_refused():
    with mosaic.stage({"known": 1}) as s, pytest.raises(InvalidPlanError, match="'unknown' is not in the plan"):
        s.run("unknown", torch.sin, torch.ones(3))


@pytest.mark.parametrize("quota", [0, 10_000])
def test_a_quota_that_cannot_be_is_refused(quota: int):
    with pytest.raises(InvalidPlanError, match="quota"):
        mosaic.stage({"wide": quota})


def test_another_function_under_the_same_name_is_another_call():
    x = torch.ones(3, requires_grad=True)
    for function in (torch.sin, torch.sin, lambda x: x.detach() + 1, lambda x: x * x, lambda x: x * x):
        with mosaic.stage() as s:
            found = s.run("reused", function, x)
        assert torch.equal(found + 0, function(x))
        assert (found + 0).requires_grad is function(x).requires_grad


def test_another_model_under_the_same_name_has_its_own_mode():
    x = pair_batch()[0]
    for training in (True, False, True):
        module = tower(8, 16, nn.Dropout(0.5)).train(training)
        for _ in range(2):
            torch.manual_seed(1)
            with mosaic.stage() as s:
                found = s.run("model", module, x) + 0
            torch.manual_seed(1)
            assert torch.equal(found, module(x))
