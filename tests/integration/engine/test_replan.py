"""A model whose modules come and go is planned anew in a running loop, and computes what the plain loop does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import Record, assert_same, tower
from graph_cases import one_thread  # noqa: F401
from torch import nn

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.engine.calls.attach import is_attached
from mosaic.errors import ModuleContractError, MosaicError
from mosaic.plan import Plan, plan_from_quotas

Batch = dict[str, torch.Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


class Encoders(nn.Module):
    """An encoder for each modality that there is, and a head over what they make together."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: tower(8, 16, nn.Dropout(0.2)) for name in names})
        self.mix = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return sum(self.encoders[name](rows) @ self.mix for name, rows in batch.items())


def batch_of(model: Encoders, step: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(6, 8, generator=generator) for name in model.encoders}


def side_by_side(model: nn.Module, sample: Any) -> Plan:
    """Two modules at a time, a slot each."""
    graph = find_modules(model, sample).graph
    names = list(graph.topological_order())
    stages = [dict.fromkeys(names[at : at + 2], 1) for at in range(0, len(names), 2)]
    return plan_from_quotas(stages, graph=graph, device=HostBackend(2).device)


def colocate(model: Encoders) -> mosaic.Handle:
    sample = batch_of(model)
    return mosaic.colocate(model, sample=sample, plan=side_by_side(model, sample), backend=HostBackend(2))


def train(model: Encoders, record: Record, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for micro in range(2):
            loss = model(**batch_of(model, 10 * step + micro)).square().mean()
            loss.backward()
            record.note(loss, torch.rand(1))
        record.note_model(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def add(model: Encoders, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(7)
    model.encoders["depth"] = tower()
    optimizer.add_param_group({"params": model.encoders["depth"].parameters()})


def test_a_loop_that_is_planned_anew_computes_what_the_plain_one_does():
    torch.manual_seed(0)
    model = Encoders("image", "text", "audio")
    twin = copy.deepcopy(model)

    def run(model: Encoders, record: Record, replan: Callable[[Batch], None]) -> None:
        torch.manual_seed(1)
        model.encoders["image"].register_forward_hook(lambda module, args, result: result * 1.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        train(model, record, optimizer, range(3))
        add(model, optimizer)
        replan(batch_of(model, 3))
        train(model, record, optimizer, range(3, 6))

    plain, ours = Record(), Record()
    run(model, plain, lambda batch: None)
    handle = colocate(twin)

    def replan(batch: Batch) -> None:
        handle.replan(batch, reason="depth came", plan=side_by_side(twin, batch))

    run(twin, ours, replan)
    described, metrics = handle.describe(), handle.metrics()
    handle.remove()
    assert_same(plain, ours)
    assert "planned anew: depth came" in described
    assert "in place" not in described
    assert "colocating" not in described
    assert metrics["replans"] == 1
    assert metrics["steps"] >= 4
    assert {f"forward_ms/encoders.{name}" for name in twin.encoders} <= metrics.keys()


def refused_in_a_step(model: Encoders, handle: mosaic.Handle) -> None:
    loss = model(**batch_of(model)).sum()
    with pytest.raises(ModuleContractError, match="in the middle of a step: the backward of a call has yet to come"):
        handle.replan(reason="too early")
    loss.backward()


def refused_without_a_reason(model: Encoders, handle: mosaic.Handle) -> None:
    with pytest.raises(ValueError, match="pass the reason for planning again"):
        handle.replan(reason=" ")


@pytest.mark.parametrize("refused", [refused_in_a_step, refused_without_a_reason])
def test_a_call_that_is_refused_changes_nothing(refused: Callable[..., None]):
    torch.manual_seed(0)
    model = Encoders("image", "text")
    handle = colocate(model)
    for _ in range(2):
        model(**batch_of(model)).sum().backward()
    plan, described = handle.plan, handle.describe()
    refused(model, handle)
    model.zero_grad()
    assert handle.active
    assert handle.plan is plan
    assert handle.describe() == described
    handle.clear_timeline()
    model(**batch_of(model)).sum().backward()
    assert {span.module for span in handle.timeline().spans if span.phase == "forward"} == set(handle.graph.names)
    handle.remove()
    with pytest.raises(ModuleContractError, match=r"after remove\(\)"):
        handle.replan(reason="too late")


def test_after_a_failure_the_model_is_plain_and_right_and_may_be_planned_again():
    torch.manual_seed(0)
    model = Encoders("image", "text")
    handle = colocate(model)
    weights = [parameter.clone() for parameter in model.parameters()]
    plan = handle.plan
    model.encoders["depth"] = tower()
    with pytest.raises(MosaicError) as failed:
        handle.replan(batch_of(model), reason="depth came", plan=plan)  # which is of two modules
    assert any("the model runs as it was written" in note for note in failed.value.__notes__)
    assert not handle.active
    assert not any(map(is_attached, model.modules()))
    assert "the last replan failed: " in handle.describe()
    assert handle.metrics()["replans"] == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=False))
    model(**batch_of(model)).sum().backward()
    batch = batch_of(model)
    handle.replan(batch, reason="depth came", plan=side_by_side(model, batch))
    assert handle.active
    assert "failed" not in handle.describe()
    handle.remove()
