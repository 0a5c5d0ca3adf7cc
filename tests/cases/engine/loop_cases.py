"""Loops as people write them, for lanes on the host and on streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from engine_cases import (
    SIDE_BY_SIDE,
    Doing,
    Glued,
    Loop,
    Record,
    TwoTowers,
    assert_same,
    keeping,
    pair_batch,
    tower,
    train,
    with_penalty,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.sweep.device import device
from mosaic.engine.calls.hidden import HOOKED

ON_LANES = ""
NOT_THERE = "the fake streams have no sparse tensors"


@dataclass(frozen=True, kw_only=True)
class LoopCase:
    """A loop that computes what the plain one does."""

    make: Callable[[], nn.Module] = TwoTowers
    loop: Loop
    sample: Callable[[], Any] = pair_batch
    host: str | None = None
    """Words of ``describe()`` on calls in place on the host: ``ON_LANES`` for none, a part of the reason, or None."""
    streams: str | None = ON_LANES
    """The same on fake streams."""
    cuda: str | None = ON_LANES
    """The same on a GPU's."""
    on_lanes: bool = True
    """False where all calls may run in place, as ``host`` says."""


# Models.


def normed() -> TwoTowers:
    return TwoTowers(tower(8, 16, nn.BatchNorm1d(16)), tower(8, 16, nn.BatchNorm1d(16)))


def dropping() -> TwoTowers:
    return TwoTowers(tower(8, 16, nn.Dropout(0.3)), tower(8, 16, nn.Dropout(0.3)))


class Repeating(nn.Module):
    """Uses one parameter three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for _ in range(3):
            hidden = self.again(hidden).tanh()
        return hidden


def hooked(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = self.left(x), self.right(y)
    left.retain_grad()
    left.register_hook(lambda grad: grad * 2)
    self.__dict__["kept"] = left
    return left @ right.T


def matched(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Chooses rows by views of results without gradients, as losses that match boxes do."""
    left, right = self.left(x), self.right(y)
    with torch.no_grad():
        order = left.flatten(0, 1).softmax(-1).unflatten(0, left.shape).sum(1).argsort()
    return left[order] @ right.T


def checkpointing_inside(reentrant: bool) -> TwoTowers:
    def what(self: Doing, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: functional.dropout(self.layers(x)), x, use_reentrant=reentrant)

    return TwoTowers(Doing(what), Doing(what))


def checkpointing_around(reentrant: bool) -> TwoTowers:
    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = checkpoint(self.left, x, use_reentrant=reentrant)
        return (left @ self.weight) @ checkpoint(self.right, y, use_reentrant=reentrant).T

    return Glued(glue)


def lending(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Calls a tower with weights that are no leaves."""
    halved = {name: parameter * 0.5 for name, parameter in self.right.named_parameters()}
    return self.left(x) @ torch.func.functional_call(self.right, halved, (y,)).T


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 16, sparse=True), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().long().clamp(max=9)).sum(1) + self.linear(x)


# Loops.


def several(forwards: int, rows: tuple[int, ...] = (6,)) -> Loop:
    """Several forwards before one backward; gradients of every other step are added to the next."""

    def loop(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            batches = [pair_batch(10 * step + index, rows[index % len(rows)]) for index in range(forwards)]
            losses = [model(*batch).square().mean() for batch in batches]
            sum(losses).backward()
            record.note(*losses)
            record.note_model(model, optimizer)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    return loop


def differentiable(step: int) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in pair_batch(step)]


def batches(steps: int = 4) -> Iterator[list[torch.Tensor]]:
    return map(differentiable, range(steps))


def with_inputs(model: nn.Module, record: Record) -> None:
    for batch in batches():
        model(*batch).square().mean().backward()
        assert all(type(tensor.grad) is torch.Tensor for tensor in batch)
        record.note(torch.rand(1, device=device()), *(tensor.grad for tensor in batch))
        record.note_model(model)


def going_backward_twice(model: nn.Module, record: Record) -> None:
    for step in range(4):
        loss = model(*pair_batch(step)).square().mean()
        loss.backward(retain_graph=True)
        record.note_model(model)
        loss.backward()
        record.note_model(model)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        model.zero_grad()


def evaluating(model: nn.Module, record: Record) -> None:
    for _ in range(2):
        train(2)(model, record)
        model.eval()
        for context in (torch.no_grad(), torch.no_grad(), torch.inference_mode()):
            with context:
                record.note(model(*pair_batch()).clone())
        record.note(model(*pair_batch()))
        model.train()


def asking_for_gradients(model: nn.Module, record: Record) -> None:
    for batch in batches():
        loss = model(*batch).square().mean()
        found = torch.autograd.grad(loss, batch, retain_graph=True)
        found += torch.autograd.grad(loss, list(model.parameters()))
        assert all(type(tensor) is torch.Tensor for tensor in found)
        record.note(*found)
        assert all(parameter.grad is None for parameter in model.parameters())


def backward_to_named_inputs(model: nn.Module, record: Record) -> None:
    for x, y in batches():
        model(x, y).square().mean().backward(inputs=[model.left[0].weight, model.weight, x])
        record.note(x.grad)
        assert y.grad is None
        record.note_model(model)


def firing_hooks(model: nn.Module, record: Record) -> None:
    calls: list[int] = []
    model.left[0].weight.register_hook(lambda grad: (calls.append(1), grad * 3)[1])
    model.right[0].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(2))
    for step in range(4):
        model(*pair_batch(step)).square().mean().backward()
        record.note(model.__dict__.pop("kept").grad + 0)
        record.note_model(model)
        record.note(torch.tensor(calls))
        calls.clear()


def adding_sparse_gradients(model: nn.Module, record: Record) -> None:
    for step in range(4):
        losses = [model(*pair_batch(step + 10 * index)).square().mean() for index in range(2)]
        sum(losses).backward()
        record.note(*losses, *(parameter.grad.to_dense() for parameter in model.parameters()))


def inside(context: Callable[[], AbstractContextManager[Any]]) -> Loop:
    def loop(model: nn.Module, record: Record) -> None:
        train(2)(model, record)
        with context():
            train(4)(model, record)
        train(2)(model, record)

    return loop


def calling_branches(model: nn.Module, record: Record) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x, y = pair_batch(step)
        loss = (model.left(x) + model.right(y)).square().mean()
        ahead = model.right(pair_batch(step + 1)[1])
        loss.backward()
        optimizer.step()
        record.note(loss, ahead)
        record.note_model(model)
        optimizer.zero_grad()


LOOPS = {
    "several forwards of a module that repeats a parameter": LoopCase(
        make=lambda: TwoTowers(Repeating(), Repeating()),
        loop=several(3),
        host="it uses a parameter several times",
        on_lanes=False,
    ),
    "forwards of several shapes": LoopCase(make=normed, loop=several(3, rows=(6, 4)), host="other shapes than planned"),
    "a second backward": LoopCase(loop=going_backward_twice),
    "views without gradients": LoopCase(make=lambda: Glued(matched), loop=with_inputs, host=ON_LANES),
    "evaluation between steps": LoopCase(make=dropping, loop=evaluating, host="inference mode is active"),
    "gradients of inputs": LoopCase(loop=with_inputs, host=ON_LANES),
    "autograd.grad": LoopCase(loop=asking_for_gradients),
    "backward to named inputs": LoopCase(loop=backward_to_named_inputs),
    "hooks on tensors and parameters": LoopCase(
        make=lambda: Glued(hooked), loop=firing_hooks, host=HOOKED, streams=HOOKED, cuda=HOOKED, on_lanes=False
    ),
    **{
        f"checkpointing {where} a module, reentrant: {reentrant}": LoopCase(
            make=make,
            sample=partial(differentiable, 0),
            loop=with_inputs,
            host="activation checkpointing",
            on_lanes=False,
        )
        for reentrant in (False, True)
        for where, make in (
            ("inside", partial(checkpointing_inside, reentrant)),
            ("around", partial(checkpointing_around, reentrant)),
        )
    },
    "a result kept in an attribute": LoopCase(
        make=lambda: TwoTowers(Doing(keeping)), loop=with_penalty, host="is kept after its call"
    ),
    "weights lent for a call": LoopCase(
        make=lambda: Glued(lending), loop=train(4), streams="right ran in place", cuda="right ran in place"
    ),
    "sparse gradients": LoopCase(make=lambda: TwoTowers(Bag()), loop=adding_sparse_gradients, streams=NOT_THERE),
    "anomaly detection": LoopCase(
        loop=inside(partial(torch.autograd.set_detect_anomaly, True)), host="anomaly detection is on"
    ),
    "the CPU as default device": LoopCase(
        loop=inside(partial(torch.device, "cpu")), host=ON_LANES, streams=None, cuda=None
    ),
    "branches called by the loop itself": LoopCase(make=normed, loop=calling_branches),
}


def check(case: LoopCase, run_both: Callable[..., Any], said: str | None) -> None:
    """Runs a case, and holds ``describe()`` to what it should say of calls in place."""
    described = run_both(case.make, case.sample(), SIDE_BY_SIDE, case.loop, on_lanes=case.on_lanes)
    if said == ON_LANES:
        assert "in place" not in described
    elif said is not None:
        assert said in described


def check_removing_between_forward_and_backward(
    colocated: Callable[..., AbstractContextManager[Any]], compare: Callable[[Record, Record], None] = assert_same
) -> None:
    torch.manual_seed(0)
    model = TwoTowers().to(device())
    plain, ours = Record(), Record()

    def loop(record: Record, between: Callable[[], None]) -> None:
        model.zero_grad()
        for step in range(3):
            loss = model(*pair_batch(step)).square().mean()
            if step == 2:
                between()
            loss.backward()
            record.note_model(model)

    loop(plain, lambda: None)
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as opened:
        handle = opened[0] if isinstance(opened, tuple) else opened
        loop(ours, handle.remove)
    compare(plain, ours)
