"""Whole images, or other units of an encoder, shared out over the ranks of a sequence: none is encoded twice.

An encoder in chunks of its own runs on its rank's units from its first layer to its last, which gathers what all ranks
made, in the order of the sequence. In a chunk with other modules it runs on all units, as every rank then does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mosaic.context.attention.items import gather_items
from mosaic.context.items import ItemShare, share_items
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.pieces import rows_of_units, take_units


class SharedItems:
    """Shares units of encoders out over a group; all ranks of the group make it and make the same calls.

    Args:
        model: This rank's part of the model.
        group: The ranks that share each sequence.
    """

    def __init__(self, model: PartedModel, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def share_of(self, kwargs: Mapping[str, Any], module: str) -> ItemShare | None:
        """Returns who encodes which units, the one with most rows first; None where each rank encodes all.

        That is where there are fewer units than ranks, and where what leaves the module has no rows of its units.
        """
        rows = rows_of_units(self._model.split, kwargs, module)
        if rows is None or len(rows) < self._ranks:
            return None
        share = share_items(rows, self._ranks)
        fits = all(_rows_in(one, share) is not None for one in self._leaving(kwargs, module))
        return share if fits else None

    def own(self, kwargs: Mapping[str, Any], module: str, share: ItemShare) -> Mapping[str, Any]:
        """Returns a microbatch with this rank's units of a module."""
        return take_units(self._model.split, kwargs, module, share.items_of(self._rank))

    def gathered(
        self, tensors: Sequence[Tensor], kwargs: Mapping[str, Any], module: str, share: ItemShare
    ) -> tuple[Tensor, ...]:
        """Returns what leaves a module on all ranks, of all units; gradients go to who encoded them.

        Args:
            tensors: What leaves it here, of this rank's units.
            kwargs: With all units.
            module: Its name.
            share: Who encodes what.
        """
        return tuple(
            self._gathered(one, like, share) for one, like in zip(tensors, self._leaving(kwargs, module), strict=True)
        )

    def _gathered(self, tensor: Tensor, like: Tensor, share: ItemShare) -> Tensor:
        rows = _rows_in(like, share)
        assert rows is not None  # that is what share_of has looked at
        with torch.set_grad_enabled(torch.is_grad_enabled() and tensor.is_floating_point()):
            found = gather_items(tensor.flatten(1), replace(share, rows=rows), self._group)
        return found.reshape(like.shape)

    def _leaving(self, kwargs: Mapping[str, Any], module: str) -> tuple[Tensor, ...]:
        """Returns what leaves a module, of all units, without data."""
        ends = next(
            index
            for index, parts in enumerate(self._model.chunks)
            if any(part.module == module and part.end == part.total for part in parts)
        )
        return self._model.boundary_like(ends, kwargs)[module]


def _rows_in(like: Tensor, share: ItemShare) -> tuple[int, ...] | None:
    """Returns the rows of each unit in a tensor of all units, which may have merged them; None where it has none."""
    total = sum(share.rows)
    if not like.ndim or not total or any(rows * len(like) % total for rows in share.rows):
        return None
    return tuple(rows * len(like) // total for rows in share.rows)
