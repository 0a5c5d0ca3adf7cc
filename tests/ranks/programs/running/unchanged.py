"""Loops as people write them, under DistributedDataParallel and colocated over two ranks: all in one start-up."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_  # a name of our own, from before any model is colocated

from mosaic.errors import UnsupportedModelError
from mosaic.ranks.calls import routed
from ranks.begun import SHORT_S, WATCH
from ranks.graphs import colocated, difference, twins
from ranks.programs.calls.refused import not_begun, refusals, unfrozen
from ranks.training import MEMBERS, Model, batch_of, loss_of, told


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    # What reaches no rank's loss has gradients of zeros here, and none under DistributedDataParallel: decay tells.
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


Loop = Callable[[nn.Module, int], list[float]]


def compare(loop: Loop, rank: int, **options: Any) -> None:
    """Runs a loop under both, and compares losses and parameters."""
    model, wrapped = twins(lambda: Model(**options), 3)
    handle = colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, 2)
    ours, theirs = loop(model, rank), loop(wrapped, rank)
    apart = difference(handle, wrapped)
    handle.remove()
    assert max(abs(a - b) / max(1e-3, abs(b)) for a, b in zip(ours, theirs, strict=True)) < 1e-4, loop
    assert apart < 1e-4, loop


def contrastive(model: nn.Module, rank: int) -> list[float]:
    optimizer, losses = optimizer_for(model), []
    for step in range(8):
        out = model(**batch_of(step, rank, (3, 3)))
        images, texts = (torch.cat(torch.distributed.nn.functional.all_gather(out[key])) for key in ("image", "text"))
        pairs, labels = (images @ texts.T, texts @ images.T), torch.arange(6)
        loss = sum(functional.cross_entropy(out["scale"] * logits, labels) for logits in pairs) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scaled(model: nn.Module, rank: int) -> list[float]:
    """At two steps one rank's towers get infinite gradients, and others' do not: all skip, and scale down."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(8):
        out = model(**batch_of(step, rank))
        loss = loss_of(out)
        if step in (2, 5):
            loss = loss + out["audio" if step == 2 else "image"].sum() * (math.inf if rank == 0 else 0.0)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(scaler.get_scale())
    assert losses[2] < losses[1], losses
    return losses


def accumulated(model: nn.Module, rank: int) -> list[float]:
    """Three micro-batches a step, one of them without audio on one rank; norms of several orders."""
    optimizer, losses = optimizer_for(model), []
    for step in range(6):
        for micro in range(3):
            batch = batch_of(10 * step + micro, rank)
            if micro == 1 and rank == 0:
                del batch["audio"]
            loss = loss_of(model(**batch)) / 3
            loss.backward()
            losses.append(loss.item())
        losses.append(float(clip_grad_norm_(model.parameters(), 0.1, norm_type=(2.0, math.inf, 1.0)[step % 3])))
        for name in ("image", "audio", "text"):  # one of the ranks may have no gradients of them
            own = (parameter for key, parameter in model.named_parameters() if f".{name}." in f".{key}")
            losses.append(float(clip_grad_norm_([one for one in own if one.grad is not None], 0.01)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def empty(model: nn.Module, rank: int) -> list[float]:
    """A rank without rows takes part in everything."""
    optimizer, losses = optimizer_for(model), []
    for step in range(4):
        out = model(**batch_of(step, rank, ((4, 0) if step % 2 else (0, 3))))
        loss = out["logits"].square().sum() + out["scale"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Named(nn.parallel.DistributedDataParallel):
    """A wrapper of one's own."""

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**super().forward(**batch), "own": torch.ones(())}


def wrapped_by_the_loop(model: nn.Module, rank: int) -> list[float]:
    """The loop moves the model, wraps it, accumulates without reducing in between, and keeps a copy."""
    inside = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    model = Named(inside.to("cpu"), find_unused_parameters=True)
    assert isinstance(copy.deepcopy(model), nn.parallel.DistributedDataParallel)
    assert set(model.state_dict()) == {f"module.{name}" for name in inside.state_dict()}
    optimizer, losses = optimizer_for(model), []
    for step in range(4):
        with model.no_sync():
            loss_of(model(**batch_of(2 * step, rank))).backward()
        out = model.train()(**batch_of(2 * step + 1, rank))
        assert "own" in out
        loss = loss_of(out)
        loss.backward()
        losses.append(loss.item())
        losses.append(float(clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def wrappers(rank: int) -> None:
    """A wrapper that would do more is refused, and so is one whose model is a plain one again."""
    kind = nn.parallel.DistributedDataParallel
    model = Model()
    handle = colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, 2)
    wrapper = kind(model, static_graph=True)
    assert "calls it with a batch of no rows" in told(wrapper.join, UnsupportedModelError)
    assert "leave the hook out" in told(lambda: wrapper.register_comm_hook(None, print), UnsupportedModelError)
    mixed = told(lambda: kind(model, mixed_precision=object()), UnsupportedModelError)
    assert "DistributedDataParallel(..., mixed_precision=...)" in mixed
    half = model.half().image[0].weight  # on the rank without it, too
    assert (half.dtype, half.is_meta) == (torch.float16, rank == 1)
    model.float()
    handle.remove()
    assert "after handle.remove() wrap the plain model again" in told(lambda: wrapper(**batch_of(0, rank)))
    assert type(kind(model)) is kind


def two_forwards(rank: int) -> None:
    """Two forwards, then two backwards: both are reduced, also where nothing is routed.

    DistributedDataParallel reduces the first one alone.
    """
    for members in (MEMBERS, dict.fromkeys(MEMBERS, (0, 1))):
        torch.manual_seed(0)
        model = Model()
        handle = colocated(model, batch_of(0, rank, (3, 3)), members, 2)
        losses = [model(**batch_of(step, rank, (3, 3)))["logits"].sum() for step in range(2)]
        for loss in losses:
            loss.backward()
        bias = model.head.bias.grad
        assert bias is not None
        assert torch.allclose(bias, torch.full((3,), 6.0)), bias  # three rows a rank and step, a mean over ranks
        weight = model.head.weight.grad.clone()
        dist.broadcast(weight, 0)
        assert torch.equal(weight, model.head.weight.grad)
        handle.remove()


def everything(rank: int, size: int) -> None:
    compare(contrastive, rank)
    compare(scaled, rank)
    compare(accumulated, rank)
    compare(accumulated, rank, frozen=("image", "text.0"))
    with mock.patch.object(routed, "_MAX_AGREEMENTS", 1):  # as where kinds of calls never repeat
        compare(empty, rank)
    compare(wrapped_by_the_loop, rank)
    for check in (two_forwards, wrappers, refusals, unfrozen, not_begun):
        check(rank)


def uneven(rank: int, size: int) -> None:
    """One rank leaves a backward out, as loops do with a loss that is not finite; both end, and say where they are."""
    torch.manual_seed(0)
    model = Model()
    colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, size, timeout_s=SHORT_S, **WATCH)

    def train() -> None:
        for step in range(4):
            loss = loss_of(model(**batch_of(step, rank)))
            if rank == 0 or step != 1:
                loss.backward()

    said = told(train)
    assert "rank 0: step 1, waiting in" in said
    assert "rank 1: step 1, waiting in the forward of '" in said  # of the first modules, whichever lane came first
    assert "in the same order on all ranks" in said
