"""Messages between context ranks: keys and values, rows of encoded items, gradients of parameters.

A rank's keys and values are one tensor ``(blocks, batch, heads, block, width)``, concatenated along the last dimension:
a block is contiguous in memory, and exchanges cut along the first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mosaic.context.items import ItemShare
from mosaic.context.plan import ContextPlan

# names of torch 2.13, and before
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Pending = Callable[[], torch.Tensor]
"""Waits for an exchange and returns its result."""


class Alone:
    """The exchange of one rank, without communication; base of the exchange of several.

    Attributes:
        column_of: Index of each block of the sequence among the fetched ones; -1 for others.
        num_blocks: Number of fetched blocks, including empty ones.
    """

    def __init__(self, plan: ContextPlan) -> None:
        self.column_of = plan.column_of()
        self.num_blocks = plan.distribution.slots

    def fetch(self, own: torch.Tensor) -> Pending:
        """Starts fetching the blocks that this rank reads, including its own."""
        return lambda: own

    def return_gradient(self, gradient: torch.Tensor) -> Pending:
        """Starts returning the gradients of fetched blocks; the result is the sum for own blocks."""
        return lambda: gradient


class FetchNeeded(Alone):
    """Sends each rank only the blocks that it reads, and their gradients back to the owners."""

    def __init__(self, plan: ContextPlan, group: Any, rank: int, device: torch.device) -> None:
        needed, rank_of = plan.needed(), plan.distribution.rank_of
        columns = plan.column_of() - rank * plan.distribution.slots
        sent = [np.flatnonzero(needed[other] & (rank_of == rank)) for other in range(plan.ranks)]
        received = [np.flatnonzero(needed[rank] & (rank_of == other)) for other in range(plan.ranks)]
        arriving = np.concatenate(received)
        self.column_of = np.full(len(rank_of), -1, np.int32)
        self.column_of[arriving] = np.arange(len(arriving), dtype=np.int32)
        self.num_blocks = len(arriving)
        self._slots = plan.distribution.slots
        self._in, self._out = [len(blocks) for blocks in received], [len(blocks) for blocks in sent]
        self._sent = torch.from_numpy(columns[np.concatenate(sent)].astype(np.int64)).to(device)
        self._group = group

    def fetch(self, own: torch.Tensor) -> Pending:
        return self._exchanged(own.index_select(0, self._sent), self._in, self._out)

    def return_gradient(self, gradient: torch.Tensor) -> Pending:
        received = self._exchanged(gradient, self._out, self._in)

        def summed() -> torch.Tensor:
            incoming = received()
            own = incoming.new_zeros(self._slots, *incoming.shape[1:])
            for places, part in zip(self._sent.split(self._out), incoming.split(self._out), strict=True):
                own[places] += part  # unique places in a part make the sum deterministic
            return own

        return summed

    def _exchanged(self, blocks: torch.Tensor, received: list[int], sent: list[int]) -> Pending:
        incoming = blocks.new_empty(sum(received), *blocks.shape[1:])
        work = dist.all_to_all_single(incoming, blocks, received, sent, group=self._group, async_op=True)

        def wait(_: torch.Tensor = blocks) -> torch.Tensor:  # keeps the input of the exchange alive
            work.wait()
            return incoming

        return wait


def gather_items(features: torch.Tensor, share: ItemShare, group: Any = None) -> torch.Tensor:
    """Returns the rows of all items in order, on every rank.

    The call is collective, also for ranks without items, and every rank must run the backward pass through the result:
    a rank's loss covers its own tokens, and gradients of a row are summed at its owner.

    Args:
        features: Encoder outputs of this rank's items in order: (rows, width).
        share: Assignment of items to ranks.
        group: Process group of the context ranks; None: the default group.
    """
    alone = share.ranks == 1 and group is None
    rank, size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    if size != share.ranks or features.ndim != 2 or features.shape[0] != share.rows_of(rank):
        raise ValueError(
            f"rank {rank} of {size} has features of shape {tuple(features.shape)}; items are divided over "
            f"{share.ranks} ranks and its own {list(share.items_of(rank))} make {share.rows_of(rank)} rows"
        )
    if share.ranks == 1 or share.room == 0:
        return features
    padded = torch.nn.functional.pad(features, (0, 0, 0, share.room - len(features)))
    if torch.is_grad_enabled() and features.is_floating_point():
        padded = padded.requires_grad_()  # otherwise this rank would skip the backward pass, and the others would wait
    gathered: torch.Tensor = _Gathered.apply(padded, share.ranks, group)
    return gathered.index_select(0, torch.from_numpy(share.order()).to(features.device))


class _Gathered(torch.autograd.Function):
    """Gathers equal numbers of rows from all ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, ranks: int, group: Any) -> torch.Tensor:
        ctx.group, ctx.shape = group, own.shape
        gathered = own.new_empty(ranks * len(own), own.shape[1])
        all_gather(gathered, own.contiguous(), group=group)
        return gathered

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = gradient.new_empty(ctx.shape)
        reduce_scatter(own, gradient.contiguous(), group=ctx.group)
        return own, None, None


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: Any = None) -> None:
    """Sums the gradients of all ranks of a group, in place; a gradient that no rank has stays None.

    A rank without a gradient, such as one without an image, adds zeros. All ranks pass the same parameters.

    Args:
        parameters: In the same order on every rank; frozen ones are skipped.
        group: Process group of the context ranks; None: the default group.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    has = torch.tensor([each.grad is not None for each in trained], dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(has, group=group)
    pending = []
    for parameter, count in zip(trained, has.tolist(), strict=True):
        if count:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient.contiguous()
            pending.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for work in pending:
        work.wait()
