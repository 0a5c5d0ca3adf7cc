"""The same loop under DistributedDataParallel and colocated over ranks, compared: called on every rank of a group."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mosaic.ranks import RankHandle
from ranks.graphs import Drawn, Shape, batch_of, colocated, difference, loss_of, subsets, twins

STEPS = 4
TOLERANCE = 1e-4
"""Of a loss, and of a tensor's largest value, after all steps: sums are added up in another order."""
KINDS = ("equal", "disjoint", "nested", "overlapping", "any", "any", "all", "any")


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True)
    return torch.optim.AdamW(
        model.parameters(), lr=0.005, weight_decay=0.1, foreach=kind == "foreach" or None, fused=kind == "fused" or None
    )


def train(
    model: nn.Module,
    shape: Shape,
    rows: list[int],
    rank: int,
    optimizer: torch.optim.Optimizer,
    *,
    clips: bool = True,
) -> list[float]:
    """The loop: unchanged, whatever the model is wrapped in."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model(*batch_of(shape, step, rows, rank)))
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def case(
    seed: int, rank: int, size: int, place: Callable[..., RankHandle] = colocated, *, routes: bool | None = None
) -> None:
    """One random model under one random layout trains as under DistributedDataParallel; ``routes`` if that is known."""
    draw = random.Random(seed)
    shape = Shape.draw(draw)
    rows = [draw.randint(1, 4) for _ in range(size)]
    model, wrapped = twins(partial(Drawn, shape), seed)
    kind = KINDS[seed % len(KINDS)]
    members = subsets(kind, model.placed, size, draw)
    name = draw.choice(["sgd", "foreach", "fused", "plain"])
    early = optimizer_of(name, model) if draw.random() < 0.5 else None  # made before it is colocated
    handle = place(model, batch_of(shape, 0, [3] * size, rank), members, size)
    ours = train(model, shape, rows, rank, early or optimizer_of(name, model))
    theirs = train(wrapped, shape, rows, rank, optimizer_of(name, wrapped))
    apart, described = difference(handle, wrapped), handle.describe()
    assert ("text.table.weight" in described) == (shape.tie != "none"), described
    handle.remove()
    assert not any(p.is_meta for p in model.parameters())
    assert routes in (None, "nothing is routed" not in described)
    assert max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours, theirs, strict=True)) < TOLERANCE, (seed, kind)
    assert apart < TOLERANCE, (seed, kind)


def random_graphs(rank: int, size: int) -> None:
    for seed in range(5 if size == 2 else 2):  # four ranks share two cores
        case(seed, rank, size)


def on_two_ranks(rank: int, size: int) -> None:
    """All that is compared on two ranks, in one start of them."""
    random_graphs(rank, size)
    bit_for_bit(rank, size)
    checkpointed(rank, size)
    with_statistics(rank, size)


def with_statistics(rank: int, size: int) -> None:
    """A buffer outside of placed modules, which each forward writes, is rank 0's in the next one."""

    class Centred(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.lerp_(x.detach().mean(), 0.5)
            return super().forward(x - self.mean).square().mean()

    model = Centred(nn.Linear(4, 4), nn.Linear(4, 2))
    model.register_buffer("mean", torch.zeros(()))
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    x = torch.randn(3, 4) + rank
    handle = colocated(model, x, {"0": (0,), "1": (1,)}, size)
    for _ in range(3):
        losses = [each(x) for each in (model, wrapped)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    handle.remove()


def bit_for_bit(rank: int, size: int) -> None:
    """Every module on all of two ranks, none scaled: every sum has two parts, so that its order is one.

    Once with the device to itself, where nothing is routed, and else on one slot of two.
    """
    for seed, num_slots in ((0, 1), (1, 1), (4, 2)):
        shape = Shape.draw(random.Random(seed))
        rows = [3, 2] if seed else [4, 4]  # parts of a global batch of 5 are 3 and 2, so that nothing moves
        model, wrapped = twins(partial(Drawn, shape), seed)
        sample = batch_of(shape, 0, [3] * size, rank)
        handle = colocated(
            model, sample, subsets("all", model.placed, size, random.Random(0)), size, num_slots=num_slots
        )
        assert ("nothing is routed" in handle.describe()) == (num_slots == 1)
        both = ((each, shape, rows, rank, optimizer_of("plain", each)) for each in (model, wrapped))
        ours, theirs = (train(*each, clips=False) for each in both)  # the sum of a norm goes another way
        state = wrapped.module.state_dict()
        same = all(torch.equal(tensor, state[name]) for name, tensor in handle.full_state_dict().items())
        assert ours == theirs
        assert same
        handle.remove()


def checkpointed(rank: int, size: int) -> None:
    """A part that is used twice is computed again in backwards within the backward, and sums are right."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.tower, x, use_reentrant=True)
            return self.head(x)

    torch.manual_seed(0)
    model = Twice()
    twin = copy.deepcopy(model)
    x = [torch.randn(3, 4, requires_grad=True) for _ in range(size)]
    for part in x:
        (twin(part).sum() / size).backward()
    handle = colocated(model, x[rank], dict.fromkeys(("tower", "head"), tuple(range(size))), size)
    model(x[rank]).sum().backward()
    assert all(torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    handle.remove()
