"""Ordinary loops that need more of the parameters than a rank has, or of the rows: right, or refused by name."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import mosaic
from mosaic.errors import UnsupportedModelError
from mosaic.ranks.parameters.gradients import GradientReducer
from ranks.graphs import check_trained, colocated
from ranks.training import told

APART = {"a": (0,), "b": (1,)}
EVERYWHERE = {"a": (0, 1), "b": (0, 1)}


class Two(nn.Module):
    """One module on what the other makes."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Momentum(nn.Module):
    """An encoder, and an average of it that follows: as in MoCo and BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = copy.deepcopy(self.a).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) - 0.5 * self.b(x)

    def follow(self, step: int = 0) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.b.parameters(), self.a.parameters(), strict=True):
                slow.mul_(0.5).add_(fast, alpha=0.5)


def linear() -> Two:
    return Two(nn.Linear(6, 8), nn.Linear(8, 2))


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def momentum(rank: int) -> None:
    """An average follows on the same ranks; one from another rank is refused where it would be written."""
    check_trained(Momentum, EVERYWHERE, lambda step: data(rank), Momentum.follow)
    model = Momentum()
    handle = colocated(model, data(rank), APART, 2)
    loss_of(model, data(rank)).backward()
    said = told(model.follow)
    refused = "add_() needs values of 'a', which are on rank 0 only" in said and "handle.full_state_dict()" in said
    assert refused if rank else said == "nothing", said  # rank 0 has nothing to write into
    handle.remove()


def sparse(rank: int) -> None:
    """A table with sparse gradients is refused by name."""
    model = Two(nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Flatten()), nn.Identity())
    said = told(lambda: colocated(model, torch.zeros(4, 3, dtype=torch.int64), {"a": (1,)}, 2), UnsupportedModelError)
    assert "a.0 has sparse gradients" in said


def reading(rank: int) -> None:
    """Loops that use all parameters of a model are told what to do; each rank lacks half of them."""
    model, x = linear(), data(rank)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    early = (torch.optim.LBFGS(model.parameters()), zero)
    handle = colocated(model, x, APART, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, x).backward()
    optimizer.step()
    said = told(lambda: torch.save(optimizer.state_dict(), io.BytesIO()))
    name, other = ("a", 0) if rank else ("b", 1)
    assert f"needs values of {name!r}, which are on rank {other} only" in said
    assert "handle.full_state_dict(), called on every rank" in said
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(optimizer.state) == sum(1 for each in model.parameters() if not each.is_meta)
    again = told(lambda: mosaic.colocate(nn.Sequential(model), x), UnsupportedModelError)
    assert "0 is colocated already; remove() the handle that has it" in again
    for each in early:
        assert "make an optimizer that steps each parameter by itself" in told(lambda each=each: each.step(lambda: 0.0))
    loss_of(model, x).backward()  # the ranks are in step
    whole = handle.full_state_dict()
    handle.remove()
    torch.save(model.state_dict(), io.BytesIO())
    assert whole.keys() == model.state_dict().keys()


def reduced(rank: int) -> None:
    """Gradients become the mean, accumulate over backwards, and are there where any rank has one."""
    weight, other, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    reducer = GradientReducer(
        [weight, half, frozen, other, unused],
        dist.group.WORLD,  # type: ignore[arg-type]
        bucket_bytes=8,
        waiting=lambda phase: nullcontext(),
    )
    for factor in (1.0, 2.0, 1.0):
        loss = (weight * (rank + 1)).sum() + (half * (rank + 1)).sum().float()
        if rank:  # rank 0 has no gradient of it
            loss = loss + (other * 4).sum()
        loss.backward()
        reducer.finish()
        gradients = [parameter.grad.tolist() for parameter in (weight, half, other)]  # type: ignore[union-attr]
        assert gradients == [[1.5 * factor] * 2, [1.5 * factor] * 2, [2.0 * factor] * 2]
        assert unused.grad is None
        if factor == 2.0:
            weight.grad = half.grad = other.grad = None
    reducer.close()


def everything(rank: int, size: int) -> None:
    for check in (momentum, sparse, reading, reduced):
        check(rank)
    dist.barrier()
