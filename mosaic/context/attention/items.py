"""All-gather of encoded images in the order of the sequence; gradients return to the rank that encoded them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mosaic.context.attention.exchange import all_gather, reduce_scatter
from mosaic.context.items import ItemShare


def gather_items(features: torch.Tensor, share: ItemShare, group: Any = None) -> torch.Tensor:
    """Returns the rows of all items, in their order, on every rank.

    The call is collective, also for ranks without items, and every rank has to run the backward pass through the
    result: a rank's loss covers its own tokens, and the gradients of a row are summed at its owner.

    Args:
        features: Encoder outputs of this rank's items, in their order: (rows, width).
        share: Assignment of items to ranks.
        group: Process group of the context ranks; None: the default one.

    Raises:
        ValueError: The number of rows or ranks differs from the share.
    """
    alone = share.ranks == 1 and group is None
    rank, size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    if size != share.ranks or features.ndim != 2 or features.shape[0] != share.rows_of(rank):
        raise ValueError(
            f"rank {rank} of {size} has features of shape {tuple(features.shape)}; items are divided over "
            f"{share.ranks} ranks and its own {list(share.items_of(rank))} make {share.rows_of(rank)} rows"
        )
    if share.room == 0:
        return features
    # Without a parameter behind it the backward pass would skip this rank, and the others would wait for it.
    anchor = features.new_zeros((), requires_grad=torch.is_grad_enabled())
    gathered: torch.Tensor = _Gathered.apply(features, anchor, share, None if alone else group, alone)
    return gathered


class _Gathered(torch.autograd.Function):
    """All ranks' rows, each padded to the size of the largest."""

    @staticmethod
    def forward(
        ctx: Any, features: torch.Tensor, anchor: torch.Tensor, share: ItemShare, group: Any, alone: bool
    ) -> torch.Tensor:
        own = features.new_zeros(share.room, features.shape[1])
        own[: len(features)] = features
        gathered = own if alone else own.new_empty(share.ranks * share.room, features.shape[1])
        if not alone:
            all_gather(gathered, own, group=group)
        order = torch.from_numpy(share.order()).to(features.device)
        ctx.of = share, group, alone, order, len(features)
        return gathered.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        share, group, alone, order, count = ctx.of
        whole = gradient.new_zeros(share.ranks * share.room, gradient.shape[1])
        whole[order] = gradient
        own = whole if alone else whole.new_empty(share.room, gradient.shape[1])
        if not alone:
            reduce_scatter(own, whole, group=group)
        return own[:count], gradient.new_zeros(()), None, None, None
