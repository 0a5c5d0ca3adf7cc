"""The ranks that train a day together: one alone, several among which Mosaic divides the model, or exact copies."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.checkpoint.ranks import Ranks


class Crew:
    """One process that trains alone, or one of several whose gradients the handle averages.

    Args:
        device: Where this rank trains.
        rank: This one.
        size: How many there are.

    Attributes:
        ranks: Who saves together where no handle knows; None for this process alone.
        scale: What losses are multiplied with, so that gradients add up to those of the mean over the global batch.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.size = size
        self.scale = float(size)
        self.ranks: Ranks | None = None
        self._group: Any = None

    def begin(self, model: nn.Module) -> None:
        """Called once the model's parameters are where they will be."""

    def moved(self, batch: Any) -> Any:
        """Returns a batch with its tensors where this rank trains."""
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch)

    def take_gradients(self) -> None:
        """Called after the backward of each micro-batch."""

    def share_gradients(self) -> None:
        """Called after the backward of the last one."""

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Returns for each flag whether it is set on any rank."""
        if self.size == 1:
            return flags
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return tuple(bool(flag) for flag in found)
