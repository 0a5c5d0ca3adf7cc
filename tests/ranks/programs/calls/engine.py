"""Programs for the tests of the ranks' engine; each is called on every rank of a gloo group."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.artifact import load
from mosaic.errors import MosaicError
from mosaic.ranks.calls import routed
from mosaic.timeline import RankTrace
from ranks.begun import SHORT_S, WATCH
from ranks.graphs import colocated


class Meets(nn.Module):
    """A layer that, once it has a group, meets another rank's in the middle of its forward and of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(_Meet.apply(x, self.group))


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        if group is not None:
            dist.barrier(group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.group is not None:
            dist.barrier(group=ctx.group)
        return grads[0], None


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.left = Meets()
        self.right = Meets()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.left(x).square() + self.right(x).sin()


def observed(rank: int, size: int) -> None:
    met_while_computing(rank, size)
    own_rows(rank, size)


def met_while_computing(rank: int, size: int) -> None:
    """One module on each rank; neither ends, forward or backward, before the other has got its rows and begun."""
    model = Pair()
    sample = torch.randn(3, 4)
    handle = colocated(model, [sample], {"left": (0,), "right": (1,)}, size, timeout_s=30)
    model(sample).sum().backward()  # what a module writes is learned at its first call, which is waited for
    model.left.group = model.right.group = handle.world.group(range(size))
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
    handle.remove()


def own_rows(rank: int, size: int) -> None:
    """Modules on all ranks, called with rows and arguments of each rank's own, agree on nothing; one is on rank 0."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor | tuple[torch.Tensor, float]:
            made = self.layer(x).tanh() * scale
            return made if scale == 1.0 else (made, scale)

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.third = Scaled(), Scaled(), Scaled()

        def forward(self, x: torch.Tensor, scales: tuple[float, ...] = ()) -> torch.Tensor:
            left = self.left(x, *scales)
            return self.third(x) + self.right(x) * (left if isinstance(left, torch.Tensor) else left[0])

    torch.manual_seed(3)
    plain, model = Towers(), Towers()
    model.load_state_dict(plain.state_dict())
    batches = [(torch.randn(3, 4), ()), (torch.randn(2, 4), (2.0,))]
    members = {"left": (0, 1), "right": (0, 1), "third": (0,)}
    handle = colocated(model, [batches[0][0]], members, size)
    sent: list[Any] = []
    plain_send = routed._all_to_all
    routed._all_to_all = lambda *args, **kwargs: (sent.append(args), plain_send(*args, **kwargs))[1]
    try:
        for _ in range(2):
            model.zero_grad()
            model(*batches[rank]).square().mean().backward()
    finally:
        routed._all_to_all = plain_send
    for one in batches:
        (plain(*one).square().mean() / size).backward()
    held = [(own, other) for own, other in zip(model.parameters(), plain.parameters(), strict=True) if not own.is_meta]
    assert all(torch.allclose(own.grad, other.grad, atol=1e-6) for own, other in held)
    assert len(sent) == 6  # of the third module: rows, results and gradients
    with TemporaryDirectory() as folder:
        spans = load(RankTrace, handle.write_trace(folder)).spans
    assert {bool(span.slots) for span in spans if span.module == "third"} == ({False} if rank else {False, True})
    handle.remove()


def failing(rank: int, size: int) -> None:
    """A module's compute fails on rank 0 in a backward: the error leaves the loop, and nothing is sent after it."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if fail_now:
                raise ArithmeticError("no such gradient")
            return grads[0]

    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Fails.apply(self.layer(x))

    fail_now = False
    model = Pair()
    model.left = Breaks()
    members = {"left": (0,), "right": (0, 1)}
    colocated(model, [torch.randn(3, 4)], members, size, timeout_s=SHORT_S, **WATCH)
    model(torch.randn(3, 4)).sum().backward()
    fail_now = True
    said = []
    for _ in range(2):  # and once it has failed, nothing is sent any more
        try:
            model(torch.randn(3, 4)).sum().backward()
        except (ArithmeticError, RuntimeError, MosaicError) as error:
            said.append(f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}")
        if rank:
            break
    if rank:
        assert said[0].startswith(("RankFailedError: rank 0", "RuntimeError")), said
        return
    assert all("ArithmeticError: no such gradient" in text for text in said), said
    assert "raised in the backward of module 'left'" in said[0]
    assert "this rank is out of step with the others" in said[0]
