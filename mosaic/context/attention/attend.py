"""Attention of one sequence whose tokens are shared out over ranks: groups of heads, one fetched while one computes.

As Llama 3 and Cornstarch do (section 5.3), keys and values travel and queries stay::

    group of heads     0           1           2
    fetch          [ 0 ][ 1 ]     [ 2 ]                  asynchronous, into a second buffer
    attention           [ 0     ][ 1     ][ 2     ]
    give back                     (backward: gradients of keys and values of each group, asynchronous too)

At most two fetched groups are alive. Local tensors are all that is kept between forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from mosaic.context.attention.agreement import check_agreement
from mosaic.context.attention.exchange import Pending, make_exchange
from mosaic.context.attention.kernels import Kernel, make_kernel
from mosaic.context.attention.room import check_room
from mosaic.context.plan import ContextPlan


class Attend:
    """The attention of all layers over one sequence; made once for each sequence, on every rank of the group.

    Making it is a meeting: ranks compare their plans before anything else is sent. Gradients of keys and values are
    sums over ranks in an order that depends on their number, so their last bits do too; outputs and gradients of
    queries have the same bits on any number of ranks on CPU cores.

    Args:
        plan: Of the sequence, the same on all ranks.
        group: Process group of the context ranks; None: the default one, or no group for a plan of one rank.
        heads: Heads of keys and values that are fetched together; more of them need more memory and fewer calls.
        exchange: Name in ``EXCHANGES``: whether all keys and values travel, or those that are read.
        kernel: Name in ``KERNELS``; None: compiled FlexAttention on CUDA, block rows elsewhere.
        device: Where tensors are.
        agreed: Whether ranks have compared their plans already.

    Raises:
        RankFailedError: Ranks have different plans; says which.
        ValueError: The group has another number of ranks than the plan, or a name is wrong.
    """

    def __init__(
        self,
        plan: ContextPlan,
        group: Any = None,
        *,
        heads: int = 1,
        exchange: str = "gather",
        kernel: str | None = None,
        device: torch.device | str = "cpu",
        agreed: bool = False,
    ) -> None:
        self.plan, self.heads, self.device = plan, heads, torch.device(device)
        self.group, self.rank, self.num_calls = group, 0, 0
        self._room_for: tuple[object, ...] | None = None
        if heads < 1:
            raise ValueError(f"heads={heads} are fetched together; use 1 or more")
        if plan.ranks > 1 or group is not None:
            self.rank = dist.get_rank(group) if agreed else check_agreement(plan, group, self.device)
        self._exchange = make_exchange(exchange, plan, group, self.rank, self.device)
        self.kernel: Kernel = make_kernel(kernel, plan, self.rank, self._exchange, self.device)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """Returns the output of this rank's tokens: shape (batch, query heads, local tokens, value width).

        Under autocast it is computed in autocast's type, as torch's own attention is.

        Args:
            q: Queries of this rank's tokens, as ``plan.layout`` orders them: (batch, query heads, local tokens, width).
            k: Keys: (batch, heads, local tokens, width); each head serves as many query heads.
            v: Values: (batch, heads, local tokens, value width).
            scale: Of the scores; None: one over the square root of the width.

        Tensors without data get one without data.

        Raises:
            ValueError: Shapes do not fit each other or the plan, or heads are not a multiple of ``heads``.
            InfeasibleError: The device has no room for one group of heads.
        """
        kind = q.device.type
        if torch.is_autocast_enabled(kind):
            to = torch.get_autocast_dtype(kind)
            with torch.autocast(kind, enabled=False):  # or products inside would be of that type, forwards alone
                return self(*(one if one.dtype == torch.float64 else one.to(to) for one in (q, k, v)), scale=scale)
        self._check(q, k, v)
        if isinstance(q, FakeTensor):  # somebody asks for shapes, maybe on this rank alone: nothing is sent
            return q.new_empty(*q.shape[:-1], v.shape[-1])
        self.num_calls += 1
        out: torch.Tensor = _Attention.apply(q, k, v, self, q.shape[-1] ** -0.5 if scale is None else scale)
        return out

    def __repr__(self) -> str:
        """Says what shapes depend on, and nothing that differs between sequences of one length."""
        return f"Attend({self.plan.layout.local_tokens} tokens on rank {self.rank} of {self.plan.ranks})"

    def groups(self, q: torch.Tensor, k: torch.Tensor) -> list[tuple[slice, slice]]:
        """Returns for each group of heads its query heads and its heads of keys."""
        share, heads = q.shape[1] // k.shape[1], self.heads
        starts = range(0, k.shape[1], heads)
        return [(slice(start * share, (start + heads) * share), slice(start, start + heads)) for start in starts]

    def fetch(self, heads: slice, k: torch.Tensor, v: torch.Tensor) -> Pending:
        """Starts to fetch the blocks that this rank reads, of some heads."""
        both = torch.cat([k[:, heads], v[:, heads]], -1).unflatten(2, (-1, self.plan.blocks.block))
        return self._exchange.fetch(both.permute(2, 0, 1, 3, 4).contiguous())

    def give_back(self, gradient: torch.Tensor) -> Pending:
        """Starts to sum the gradients of fetched blocks at their owners."""
        return self._exchange.give_back(gradient)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        tokens = self.plan.layout.local_tokens
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if any(one.ndim != 4 or one.shape[2] != tokens for one in (q, k, v)):
            raise ValueError(
                f"{shapes}; this rank has {tokens} places: give (batch, heads, {tokens}, width), tokens as "
                "ContextBatch cuts them. A cache of earlier keys is not supported: call the model with use_cache=False"
            )
        if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError(f"{shapes}; batches, heads of keys and values, and widths of queries and keys are equal")
        if q.shape[1] % k.shape[1] != 0:
            raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} heads of keys and values")
        if k.shape[1] % self.heads != 0:
            fit = [heads for heads in range(1, k.shape[1] + 1) if k.shape[1] % heads == 0]
            raise ValueError(f"heads={self.heads} does not divide {k.shape[1]} heads of keys; use one of {fit}")
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; use one type")
        seen = k.shape, v.shape, k.dtype
        if seen != self._room_for:  # once for all layers that are alike
            tokens = self._exchange.num_blocks * self.plan.blocks.block
            check_room(k, v, heads=self.heads, tokens=tokens, device=self.device)
            self._room_for = seen


class _Ahead:
    """Fetched blocks of one group of heads after the other; while one is in use the next one is on its way."""

    def __init__(self, attend: Attend, groups: list[tuple[slice, slice]], k: torch.Tensor, v: torch.Tensor) -> None:
        self._start = lambda heads: attend.fetch(heads, k, v)
        self._left = [heads for _, heads in groups]
        self._pending = self._start(self._left.pop(0))

    def take(self) -> torch.Tensor:
        """Waits for a group's blocks; whoever takes them drops them before taking the next."""
        arrived = self._pending.wait()
        if self._left:
            self._pending = self._start(self._left.pop(0))
        else:
            del self._pending
        return arrived


class _Attention(torch.autograd.Function):
    """Forward and backward of ``Attend``."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend, scale: float
    ) -> torch.Tensor:
        groups = attend.groups(q, k)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ahead, ctx.kept = _Ahead(attend, groups, k, v), []
        for own, _ in groups:
            kv = ahead.take()
            out[:, own], kept = attend.kernel.forward(q[:, own], kv, scale)
            ctx.kept.append(kept)
            del kv
        ctx.save_for_backward(q, k, v, out)
        ctx.attend, ctx.scale = attend, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        attend: Attend = ctx.attend
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        groups = attend.groups(q, k)
        ahead, back = _Ahead(attend, groups, k, v), None
        for (own, keys), kept in zip(groups, ctx.kept, strict=True):
            kv = ahead.take()
            dq[:, own], dkv = attend.kernel.backward(kept, q[:, own], kv, out[:, own], gradient[:, own], ctx.scale)
            del kv
            _take(back, dk, dv)  # the last group's gradients travelled while this one's were computed
            back = keys, attend.give_back(dkv)
            del dkv
        _take(back, dk, dv)
        return dq, dk, dv, None, None


def _take(back: tuple[slice, Pending] | None, dk: torch.Tensor, dv: torch.Tensor) -> None:
    if back is None:
        return
    heads, pending = back
    both = pending.wait().permute(1, 2, 0, 3, 4).flatten(2, 3)
    dk[:, heads], dv[:, heads] = both[..., : dk.shape[-1]], both[..., dk.shape[-1] :]
